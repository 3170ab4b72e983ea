"""What `kvferry` itself exports: every name loads, type checkers see the same names, and each is on the page."""

import ast
import re
import subprocess
import sys

import pytest

import kvferry
from tests.harness.repository import DOCS, SRC

PAGE = (DOCS / "reference" / "api.md").read_text()


@pytest.mark.parametrize("name", kvferry.__all__)
def test_every_public_name_loads_and_is_on_the_page(name: str) -> None:
    assert getattr(kvferry, name) is not None
    assert re.search(rf"\b{name}\b", PAGE), f"docs/reference/api.md does not name {name}"


def test_type_checkers_see_the_names_that_load_at_run_time() -> None:
    imported = {
        alias.name
        for node in ast.walk(ast.parse((SRC / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvferry.")
        for alias in node.names
    }
    assert imported == {*kvferry.__all__} - {"__version__"}
    assert kvferry.__all__ == sorted(kvferry.__all__)
    assert set(kvferry.__all__) <= set(dir(kvferry))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvferry' has no attribute 'Ferry'"):
        _ = kvferry.Ferry


def test_a_name_is_loaded_only_on_its_first_use() -> None:
    code = (
        "import sys, kvferry\n"
        "assert not [m for m in sys.modules if m.startswith('kvferry.')]\n"
        "kvferry.FerrySettings()\n"
        "print(sorted(m for m in sys.modules if m.startswith('kvferry.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['kvferry.errors', 'kvferry.settings']"


def test_the_code_on_the_page_runs() -> None:
    """All blocks except the last, which names an adapter that the reader has to write."""
    *blocks, suite = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "api.md", "exec"), namespace)
    compile(suite, "api.md", "exec")
