"""Habits of the sources that a machine can check: short files, asserts that say why, tests that never sleep."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.repository import SRC

FILES = sorted(SRC.rglob("*.py"))


def _package(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500, "split this module"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_asserts_say_which_promise_broke(path: Path) -> None:
    if _package(path) == "testing":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assert):
            assert node.msg is not None, f"{path}:{node.lineno}: assert without a message"


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].rglob("*.py")), ids=lambda p: p.name)
def test_tests_never_sleep(path: Path) -> None:
    if path.name in {"vllm_peer.py", "vllm_servers.py"}:
        return  # they run vLLM servers for benchmarks: a poll of a foreign process, and a patch of its spinning
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr == "sleep" and isinstance(node.value, ast.Name):
            assert node.value.id != "time", f"{path}:{node.lineno}: poll a condition with a deadline instead"


def test_import_loads_nothing_heavy() -> None:
    heavy = ("torch", "nixl", "zmq", "aiohttp", "numpy", "msgspec", "vllm", "transformers")
    code = f"import sys, kvferry; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def _exported(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_all_names_what_other_modules_may_use(path: Path) -> None:
    """Modules with public functions or classes have a sorted `__all__`, and other modules import nothing private."""
    tree = ast.parse(path.read_text())
    public = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    exported = _exported(tree)
    if public - {"main"} and path.name != "__main__.py":
        assert exported is not None, "no __all__"
        assert public - set(exported) == set(), "public, and not in __all__"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvferry"):
            private = [alias.name for alias in node.names if alias.name.startswith("_") and alias.name != "__version__"]
            assert private == [], f"line {node.lineno}: private to {node.module}"


def test_every_module_is_imported_without_a_warning() -> None:
    """One fresh interpreter with -W error imports all of them, but those that need vLLM."""
    code = (
        "import importlib, pkgutil, warnings, kvferry\n"
        "warnings.filterwarnings('ignore', message='.*SwigPy.*|.*swigvarlink.*', category=DeprecationWarning)\n"
        "for module in pkgutil.walk_packages(kvferry.__path__, 'kvferry.'):\n"
        "    if module.name.endswith('__main__'): continue\n"
        "    try: importlib.import_module(module.name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        if error.name != 'vllm': raise\n"
        "    except Exception as error: raise SystemExit(f'{module.name}: {error!r}')\n"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
