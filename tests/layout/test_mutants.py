"""Deliberate faults in the planner: the suite of random worlds must catch each of them."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import kvferry.layout

HOME = Path(kvferry.layout.__file__).parent
MAX_CASES = 600

MUTANTS = {
    "dropped head offset of the source": (
        "edge",
        "source_offset += (start - source_axis.start)",
        "source_offset += start",
    ),
    "dropped head offset of the destination": (
        "edge",
        "destination_offset += (start - destination_axis.start)",
        "destination_offset += 0",
    ),
    "dropped merge condition of the destination": (
        "edge",
        " & (destination[:-1] + length[:-1] == destination[1:])",
        "",
    ),
    "blocks merged where only the source follows on": (
        "planning",
        "np.where(steps == np.diff(destination), steps, -1)",
        "np.where(steps == steps, steps, -1)",
    ),
    "axes merged where only the source follows on": ("edge", "if dim[1] == dim[2] == run", "if dim[1] == run"),
    "count instead of position": (
        "tokens",
        "source_local = source.local(begin) - source.first_local",
        "source_local = source.local(begin) - source.local(begin[:1])",
    ),
    "tokens always from the start of a block": (
        "planning",
        "destination + stretch.destination_token * group.token[1]",
        "destination",
    ),
    "partial blocks taken for whole ones": (
        "planning",
        "_select(stretch, stretch.count == tokens)",
        "_select(stretch, stretch.count > 0)",
    ),
    "decode's own prefix copied again": (
        "tokens",
        "max(wanted.start, source.first_token, destination.first_token)",
        "max(source.first_token, destination.first_token)",
    ),
    "dealt tokens of the first rank": ("tokens", "rest - self.cp_rank * self.cp_run, 0", "rest, 0"),
    "cuts at the source's blocks only": (
        "tokens",
        "marks = [source.block_starts(start, stop), destination.block_starts(start, stop)]",
        "marks = [source.block_starts(start, stop)]",
    ),
    "a missing position is not refused": ("tokens", "if missing is not None:", "if False:"),
    "the last block of whole ones forgotten": (
        "tokens",
        "last = -(-(high - source.first_local) // source.block_tokens)",
        "last = (high - source.first_local) // source.block_tokens",
    ),
    "each side packs in its own order": (
        "packing",
        "key=lambda dim: -dim[1])",
        "key=lambda dim: -dim[own])",
    ),
    "each side puts tokens where its own strides say": (
        "packing",
        "split = box.token[0] if",
        "split = box.token[own - 1] if",
    ),
    "staging forgets where a stretch begins": (
        "packing",
        "staging_offset=int(begins[stretch_rows][0]) * token_staging",
        "staging_offset=0",
    ),
    "a state of any token will do": ("tokens", "if side.first_token != end:", "if False:"),
}
SURVIVES_THE_WORLDS = {"a state of any token will do"}
"""The random worlds have valid states only; test_planning has the invalid ones."""


class _Loader(SourceFileLoader):
    """Loads a module with one piece of its text replaced."""

    def __init__(self, name: str, path: str, old: str, new: str) -> None:
        super().__init__(name, path)
        self._old, self._new = old, new

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        text = Path(self.path).read_text()
        assert text.count(self._old) == 1, f"the mutant's text is there {text.count(self._old)} times: {self._old!r}"
        return compile(text.replace(self._old, self._new), self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, module: str, old: str, new: str) -> None:
        self._name, self._old, self._new = f"kvferry.layout.{module}", old, new
        self._path = str(HOME / f"{module}.py")

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        return spec_from_file_location(fullname, loader=_Loader(fullname, self._path, self._old, self._new))


@contextmanager
def mutated(module: str, old: str, new: str) -> Iterator[Callable[[str], bool]]:
    """Runs the property test's `one` on a planner with the fault in it."""
    mine = ("kvferry.layout", "tests.layout")
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(mine)}
    finder = _Finder(module, old, new)
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module("tests.layout.test_property").one
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.startswith(mine)]:
            del sys.modules[name]
        sys.modules.update(saved)
        for name in mine:
            parent, _, child = name.rpartition(".")
            if name in saved:
                setattr(sys.modules[parent], child, saved[name])


def killed_after(one: Callable[[str], bool]) -> int | None:
    """Returns how many cases it took to find the fault."""
    for number in range(MAX_CASES):
        try:
            one(f"mutants.{number}")
        except Exception:  # noqa: BLE001 (a mutant may fail in any way; that it fails is what counts)
            return number + 1
    return None


@pytest.mark.parametrize("name", sorted(set(MUTANTS) - SURVIVES_THE_WORLDS))
def test_the_suite_finds_the_fault(name: str) -> None:
    with mutated(*MUTANTS[name]) as one:
        cases = killed_after(one)
    assert cases is not None, f"{MAX_CASES} cases did not notice: {name}"


def test_the_planner_itself_passes() -> None:
    with mutated("planning", "24 MiB of runs per piece", "24 MiB per piece") as one:
        for number in range(60):
            one(f"mutants.{number}")
