"""Habits of the sources that a machine can check: short files, asserts that say why, tests that never sleep."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.repository import ROOT, SRC

FILES = sorted(SRC.rglob("*.py"))
TESTS = sorted(path for folder in ("tests", "benchmarks/tests") for path in (ROOT / folder).rglob("*.py"))


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


SLEEPS = {
    "tests/harness/until.py": "it is the one place that waits between two polls",
    "tests/harness/traced_worker.py": "the stages of two workers overlap, and only real time passes for both at once",
    "tests/harness/vllm_peer.py": "it makes sched_yield sleep, in the processes of vLLM",
    "tests/harness/vllm_servers.py": "it polls servers of vLLM for minutes, and reports progress",
    "tests/e2e/test_chaos.py": "real processes are suspended for this long",
    "tests/e2e/test_router.py": "it compares real times, and lets the last request's threads come to rest",
    "tests/e2e/under_load.py": "it kills real processes at intervals that its flags set",
}
"""The files that may sleep, with the reason. Everything else waits for a condition, or moves a clock of its own."""


def _sleeps(source: str) -> list[int]:
    """Returns the lines that sleep: time.sleep and asyncio.sleep, and waits for an Event that is never set."""
    tree = ast.parse(source)
    events, found = set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and "Event()" in ast.unparse(node.value):
            names = [name for target in node.targets for name in ast.walk(target)]
            events |= {name.id for name in names if isinstance(name, ast.Name)}
            events |= {name.attr for name in names if isinstance(name, ast.Attribute)}
    used = {name for name in events if f"{name}.set" not in source and source.count(name) > 1}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        owner, argument = ast.unparse(node.func.value), ast.unparse(node.args[0])
        pauses = owner.endswith("Event()") or owner.rpartition(".")[2] in used
        sleeps = owner in ("time", "asyncio") and argument != "0"
        if {"sleep": sleeps, "wait": pauses}.get(node.func.attr, False):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", TESTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_tests_never_sleep(path: Path) -> None:
    found = _sleeps(path.read_text())
    if str(path.relative_to(ROOT)) in SLEEPS:
        assert found, "it does not sleep any more: take it out of SLEEPS"
    else:
        assert found == [], f"{path}: wait for a condition (tests/harness/until.py), or move a clock"


def test_sleeps_are_found() -> None:
    source = (
        "time.sleep(1)\nawait asyncio.sleep(n)\nawait asyncio.sleep(0)\nEvent().wait(2)\n"
        "pause, set_ = Event(), Event()\npause.wait(1)\nset_.wait(1)\nset_.set()\n"
    )
    assert sorted(_sleeps(source)) == [1, 2, 4, 6]


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
