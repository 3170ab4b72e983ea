"""The walls between rooms hold, and each of them fails when a line breaks it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.architecture.walls import (
    MAX_MODULES,
    MAY_OCCUR_TWICE,
    Tree,
    circles,
    crowded_folders,
    forbidden_imports,
    forbidden_libraries,
    repeated_names,
)
from tests.harness.repository import SRC

REAL = Tree(SRC)
GOOD = {
    "__init__.py": "",
    "errors.py": "",
    "layout/__init__.py": "",
    "layout/blocks.py": "import numpy\nfrom kvferry.errors import FerryError\n",
    "handoff/__init__.py": "",
    "handoff/orders.py": "from kvferry.layout.blocks import BlockTable\n",
    "handoff/decode/__init__.py": "",
    "handoff/decode/machine.py": "from kvferry.handoff.orders import StepOrders\n",
    "handoff/driver/__init__.py": "",
    "handoff/driver/driver.py": "from kvferry.handoff.orders import StepOrders\n",
    "connector/__init__.py": "",
    "connector/base.py": "from kvferry.handoff.orders import StepOrders\n",
    "connector/scheduler.py": "from kvferry.connector.base import SchedulerHalf\n",
    "connector/worker.py": "from kvferry.handoff.driver.driver import Driver\n",
    "engines/__init__.py": "",
    "engines/mini/__init__.py": "",
    "engines/mini/scheduling/__init__.py": "",
    "engines/mini/scheduling/scheduler.py": "from kvferry.connector.base import SchedulerHalf\n",
    "engines/mini/compute/__init__.py": "",
    "engines/mini/compute/runner.py": "import torch\n",
    "engines/vllm/__init__.py": "",
    "engines/vllm/scheduler_side/__init__.py": "",
    "engines/vllm/scheduler_side/engine.py": "",
    "engines/vllm/worker_side/__init__.py": "",
    "engines/vllm/worker_side/worker.py": "import torch\n",
}
"""A small tree that keeps to every wall."""

Check = Callable[[Tree], list[str]]
CHECKS: tuple[Check, ...] = (forbidden_imports, forbidden_libraries, circles, crowded_folders, repeated_names)


def tree(folder: Path, changes: dict[str, str]) -> Tree:
    """The good tree with some files added or replaced."""
    for name, text in {**GOOD, **changes}.items():
        (folder / "kvferry" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "kvferry" / name).write_text(text)
    return Tree(folder / "kvferry")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_sources_keep_to_every_wall(check: Check) -> None:
    assert check(REAL) == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_good_tree_passes(check: Check, tmp_path: Path) -> None:
    assert check(tree(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("check", "file", "text", "sentence"),
    [
        (forbidden_imports, "layout/blocks.py", "import kvferry.handoff.orders\n", "layout must not import handoff"),
        (
            forbidden_imports,
            "layout/blocks.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvferry.handoff.orders import StepOrders\n",
            "layout must not import handoff",
        ),
        (
            forbidden_imports,
            "layout/blocks.py",
            "def late():\n    from kvferry.handoff import orders\n",
            "layout must not import handoff",
        ),
        (
            forbidden_imports,
            "connector/scheduler.py",
            "from kvferry.connector.worker import HandoffWorker\n",
            "connector.scheduler must not import connector.worker",
        ),
        (
            forbidden_imports,
            "connector/worker.py",
            "from kvferry.connector.scheduler import HandoffScheduler\n",
            "connector.worker must not import connector.scheduler",
        ),
        (
            forbidden_imports,
            "handoff/decode/machine.py",
            "from kvferry.handoff.driver.driver import Driver\n",
            "handoff.decode must not import handoff.driver",
        ),
        (
            forbidden_imports,
            "engines/mini/compute/runner.py",
            "from kvferry.connector.base import SchedulerHalf\n",
            "mini.compute must not import connector.base",
        ),
        (
            forbidden_imports,
            "engines/mini/compute/runner.py",
            "from kvferry.engines.vllm.worker_side import worker\n",
            "mini.compute must not import vllm.worker_side",
        ),
        (
            forbidden_imports,
            "engines/vllm/worker_side/worker.py",
            "from kvferry.engines.vllm.scheduler_side.engine import VllmEngine\n",
            "vllm.worker_side must not import vllm.scheduler_side",
        ),
        (forbidden_imports, "attic/box.py", "", "attic/box.py is in no room of the table"),
        (forbidden_imports, "layout/blocks.py", "from . import tokens\n", "relative import"),
        (forbidden_libraries, "layout/blocks.py", "import torch\n", "layout must not import torch"),
        (forbidden_libraries, "layout/blocks.py", "import leftpad\n", "leftpad has no home in the table"),
        (
            forbidden_libraries,
            "engines/mini/scheduling/scheduler.py",
            "import torch\n",
            "engines.mini.scheduling must not import torch",
        ),
        (forbidden_libraries, "handoff/decode/machine.py", "import socket\n", "handoff must not import socket"),
        (forbidden_libraries, "handoff/driver/driver.py", "import socket\n", "handoff must not import socket"),
        (forbidden_libraries, "handoff/decode/machine.py", "import time\n", "handoff.decode must not import time"),
        (
            circles,
            "errors.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvferry.layout.blocks import BlockTable\n",
            "errors and layout.blocks import each other",
        ),
        (repeated_names, "handoff/blocks.py", "", "blocks names 2 modules: handoff.blocks, layout.blocks"),
    ],
)
def test_a_line_that_breaks_a_wall_is_found(check: Check, file: str, text: str, sentence: str, tmp_path: Path) -> None:
    found = check(tree(tmp_path, {file: text}))
    assert any(sentence in one for one in found), found


def test_a_heap_is_found(tmp_path: Path) -> None:
    heap = {f"layout/m{number}.py": "" for number in range(MAX_MODULES)}
    assert crowded_folders(tree(tmp_path, heap)) == [f"layout holds {MAX_MODULES + 1} modules: make rooms inside it"]


def test_the_list_of_names_that_may_occur_twice_is_short_and_used() -> None:
    assert len(MAY_OCCUR_TWICE) <= 12
    found = {sentence.split(" ")[0] for sentence in repeated_names(REAL, ())}
    assert set(MAY_OCCUR_TWICE) <= found, "a name that no longer occurs twice"
