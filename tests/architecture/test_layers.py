"""Who may import whom, as a table; and where third-party libraries may be imported. Arrows go down only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "kvferry"
FILES = sorted(SRC.rglob("*.py"))

GROUND = {"", "ids", "errors", "clock", "settings", "stats"}
MAY_IMPORT: dict[str, set[str]] = {
    "": set(),
    "__main__": {"cli"},
    "ids": set(),
    "errors": set(),
    "clock": set(),
    "settings": {"errors"},
    "stats": {"ids"},
    "layout": GROUND,
    "wire": GROUND | {"layout"},
    "handshake": GROUND | {"layout", "wire"},
    "web": GROUND | {"wire"},
    "transport": GROUND | {"layout"},
    "sidechannel": GROUND | {"wire", "handshake"},
    "handoff": GROUND | {"layout", "wire", "handshake", "transport"},
    "connector": GROUND | {"layout", "wire", "handshake", "sidechannel", "handoff", "transport"},
    "engines": GROUND | {"layout", "wire", "handshake", "connector", "web"},
    "router": GROUND | {"wire", "handshake", "web"},
    "testing": GROUND | {"layout", "wire", "handshake", "sidechannel", "handoff", "transport", "connector"},
    "cli": GROUND
    | {"layout", "wire", "handshake", "sidechannel", "handoff", "transport", "connector", "engines", "router", "web"}
    | {"testing"},
}
THIRD_PARTY_HOMES = {
    "numpy": {"layout", "handoff", "transport", "testing", "engines", "wire", "cli", "connector"},
    "msgspec": {"wire", "handshake", "settings", "cli", "router", "layout", "engines", "connector", "web"},
    "zmq": {"sidechannel", "cli"},
    "torch": {"engines", "transport", "cli"},
    "nixl": {"transport", "cli"},
    "mooncake": {"transport"},
    "aiohttp": {"engines", "router", "cli", "web"},
    "httptools": {"router"},
    "uvloop": {"web"},
    "prometheus_client": {"engines", "router"},
    "opentelemetry": {"router"},
    "safetensors": {"engines", "handshake"},
    "tokenizers": {"engines"},
    "gguf": {"engines"},
    "jinja2": {"engines"},
    "xxhash": {"layout", "handoff", "handshake", "engines", "testing"},
    "transformers": {"cli"},
    "vllm": {"engines", "cli"},
    "pytest": {"testing"},
    "hypothesis": {"testing"},
}
STDLIB = set(sys.stdlib_module_names)


def _package(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            if node.module == "kvferry":
                found.update(f"kvferry.{alias.name}" for alias in node.names if not alias.name.startswith("__"))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_keep_to_the_table(path: Path) -> None:
    home = _package(path)
    assert home in MAY_IMPORT, f"{home!r} is not in the import table: add it, with what it may import"
    for name in _imports(path):
        top = name.split(".")[0]
        if top == "kvferry":
            target = [*name.split("."), ""][1]
            assert target == home or target in MAY_IMPORT[home], f"{home} must not import kvferry.{target}"
        elif top not in STDLIB:
            assert top in THIRD_PARTY_HOMES, f"{top} has no home in the table"
            assert home in THIRD_PARTY_HOMES[top], f"{home} must not import {top}"


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
