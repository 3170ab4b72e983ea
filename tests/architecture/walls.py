"""What the walls between rooms are, as data, and how a tree of sources is checked against them.

A *room* is a package or a module, named without the leading `kvferry.`; a module belongs to the longest name in ROOMS
that it begins with. Imports under TYPE_CHECKING and inside functions count like all others. Every check returns a list
of sentences, one per violation, so that tests can run it over the real tree and over a small one that breaks a wall.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path

__all__ = [
    "MAX_MODULES",
    "MAY_OCCUR_TWICE",
    "NO_THIRD_PARTY",
    "ROOMS",
    "THIRD_PARTY_HOMES",
    "Tree",
    "circles",
    "crowded_folders",
    "forbidden_imports",
    "forbidden_libraries",
    "repeated_names",
]

GROUND = {"ids", "errors", "clock", "settings", "stats", "modelfiles"}
BELOW_HANDOFF = GROUND | {"layout", "wire"}
MACHINE = BELOW_HANDOFF | {"handshake", "handoff", "transport.base"}
"""What a state machine may know: records, and the transport's types; no driver, no transport that does I/O."""
CONNECTOR = {"connector", "connector.base", "connector.lookahead", "connector.peers"}
MINI_RECORDS = GROUND | {"layout", "wire", "mini.api", "mini.settings", "mini.speculation_settings", "mini.step"}
MINI_MODELS = MINI_RECORDS | {"mini.models"}
MINI_CACHE = MINI_MODELS | {"mini.cache"}
MINI_COMPUTE = MINI_CACHE | {"mini.compute"}
VLLM_RECORDS = GROUND | {"layout", "wire", "vllm.metadata", "vllm.options", "vllm.channel", "vllm.describe"}
ROUTER = GROUND | {"wire", "web", "router.settings"}
ROUTER_UPSTREAM = ROUTER | {"router.fleet", "router.upstream"}
ROUTER_DISPATCH = ROUTER_UPSTREAM | {
    "router.client_body",
    "router.handoff_params",
    "router.observe",
    "router.context",
    "router.answer",
    "router.sources",
}

ROOMS: Mapping[str, set[str]] = {
    # What `kvferry` itself offers to engines' authors, for type checkers: at run time it loads nothing.
    "": BELOW_HANDOFF | {"connector", "connector.base", "connector.engine", "connector.worker", "handshake"},
    "__main__": {"cli"},
    "ids": set(),
    "errors": set(),
    "clock": set(),
    "modelfiles": {"errors"},
    "settings": {"errors"},
    "stats": {"ids"},
    "layout": GROUND,
    "wire": GROUND | {"layout"},
    "handshake": BELOW_HANDOFF,
    "web": GROUND | {"wire"},
    "sidechannel": GROUND | {"wire", "handshake"},
    "transport": GROUND | {"layout", "transport.base"},
    "transport.base": GROUND | {"layout"},
    "transport.registry": GROUND | {"transport.base"},
    "transport.memory": GROUND | {"layout", "transport", "transport.base"},
    "transport.nixl": GROUND | {"layout", "transport", "transport.base"},
    "transport.staging": GROUND | {"layout", "transport.base"},
    "handoff": MACHINE | {"handoff.decode", "handoff.prefill"},
    "handoff.decode": MACHINE,
    "handoff.prefill": MACHINE,
    "handoff.driver": MACHINE | {"transport.staging"},
    # The two halves of the connector meet in the records of connector.base, and nowhere else.
    "connector": BELOW_HANDOFF | CONNECTOR | {"handoff", "handshake", "sidechannel"},
    "connector.base": BELOW_HANDOFF | {"handoff"},
    "connector.lookahead": BELOW_HANDOFF,
    "connector.peers": BELOW_HANDOFF,
    "connector.entries": BELOW_HANDOFF | CONNECTOR | {"handoff"},
    "connector.fetches": BELOW_HANDOFF | CONNECTOR | {"connector.entries", "handoff"},
    "connector.holdings": BELOW_HANDOFF | CONNECTOR | {"connector.entries", "handoff"},
    "connector.scheduler": BELOW_HANDOFF
    | CONNECTOR
    | {"connector.entries", "connector.fetches", "connector.holdings", "handoff"},
    "connector.by_mode": BELOW_HANDOFF | CONNECTOR | {"connector.scheduler"},
    "connector.worker": BELOW_HANDOFF
    | {"connector.base", "handoff", "handoff.driver", "transport.base", "transport.registry", "transport.staging"},
    "connector.engine": BELOW_HANDOFF
    | CONNECTOR
    | {"connector.by_mode", "connector.rendezvous", "connector.scheduler", "handoff", "handshake", "sidechannel"},
    "engines": set(),
    # The embedded engine, floor by floor. It never knows vLLM's plug-in.
    "mini": set(),
    "mini.api": GROUND | {"wire"},
    "mini.settings": GROUND | {"mini.speculation_settings"},
    "mini.speculation_settings": GROUND | {"connector.lookahead"},
    "mini.step": GROUND | {"layout"},
    "mini.models": MINI_RECORDS,
    "mini.cache": MINI_MODELS,
    "mini.compute": MINI_CACHE,  # and so never the connector
    "mini.speculation": MINI_COMPUTE | {"connector.lookahead"},
    "mini.ranks": MINI_COMPUTE | {"mini.speculation", "connector.base", "connector.worker"},
    "mini.scheduling": MINI_RECORDS | {"mini.models", "mini.speculation", "connector.base", "connector.lookahead"},
    "mini.drafting": MINI_COMPUTE | {"mini.speculation", "mini.ranks", "mini.scheduling", "connector.lookahead"},
    "mini.isolation": MINI_COMPUTE
    | {"mini.speculation", "mini.ranks", "mini.scheduling", "mini.drafting", "connector.base"},
    "mini.engine": MINI_COMPUTE
    | {"mini.speculation", "mini.ranks", "mini.scheduling", "mini.drafting", "mini.isolation"}
    | CONNECTOR,
    "mini.server": MINI_RECORDS | {"web", "mini.scheduling", "mini.engine"},
    "mini.worker": MINI_COMPUTE
    | {"mini.speculation", "mini.ranks", "mini.scheduling", "mini.engine"}
    | CONNECTOR
    | {"", "connector.engine", "connector.rendezvous", "connector.scheduler", "connector.worker", "handshake"},
    # vLLM's plug-in. Its two sides meet in metadata and channel, and never import each other.
    "vllm": GROUND | {"connector.base", "vllm.metadata", "vllm.options"},
    "vllm.options": GROUND,
    "vllm.metadata": GROUND | {"connector.base"},
    "vllm.channel": GROUND | {"connector.base"},
    "vllm.describe": BELOW_HANDOFF | {"handshake"},
    "vllm.scheduler_side": VLLM_RECORDS
    | CONNECTOR
    | {"vllm", "connector.engine", "connector.rendezvous", "connector.scheduler", "handshake"},
    "vllm.worker_side": VLLM_RECORDS | {"vllm", "connector.base", "connector.worker"},
    "vllm.connector": VLLM_RECORDS | {"vllm", "vllm.scheduler_side", "vllm.worker_side", "connector.base"},
    # The router, floor by floor.
    "router": set(),
    "router.settings": GROUND,
    "router.keys": GROUND | {"web"},
    "router.client_body": GROUND | {"web"},
    "router.fleet": ROUTER | {"handshake"},
    "router.handoff_params": ROUTER | {"router.fleet"},
    "router.sources": ROUTER | {"router.fleet"},
    "router.upstream": ROUTER | {"router.fleet"},
    "router.observe": ROUTER | {"router.fleet"},
    "router.context": ROUTER_UPSTREAM | {"router.observe"},
    "router.answer": ROUTER_UPSTREAM | {"router.client_body"},
    "router.accounting": ROUTER_DISPATCH,
    "router.calls": ROUTER_DISPATCH | {"router.accounting"},
    "router.dispatch": ROUTER_DISPATCH | {"router.calls"},
    "router.draining": ROUTER_DISPATCH | {"router.dispatch"},
    "router.app": {""} | ROUTER_DISPATCH | {"router.keys", "router.dispatch", "router.draining"},
    "testing": BELOW_HANDOFF
    | {"transport.base", "transport.registry", "transport.memory"}
    | CONNECTOR
    | {"connector.engine", "connector.scheduler", "connector.worker"},
    "testing.simulator": MACHINE | {"handoff.decode", "handoff.prefill", "testing"},
    "cli": {"*"},
}
"""For each room: the rooms that it may import, besides itself. `mini` and `vllm` stand for `engines.mini` and
`engines.vllm`, `*` for every room, the empty name for `kvferry` itself."""

THIRD_PARTY_HOMES: Mapping[str, set[str]] = {
    "numpy": {"layout", "wire", "transport", "handoff", "connector", "engines", "testing", "cli"},
    "msgspec": {"wire", "handshake", "settings", "layout", "connector", "web", "engines", "router", "cli"},
    "zmq": {"sidechannel", "cli"},
    "torch": {"transport", "engines", "cli"},
    "nixl": {"transport", "cli"},
    "aiohttp": {"web", "engines", "router", "cli"},
    "uvloop": {"web"},
    "httptools": {"router"},
    "prometheus_client": {"engines", "router", "cli"},
    "opentelemetry": {"router"},
    "safetensors": {"engines"},
    "tokenizers": {"engines"},
    "gguf": {"engines"},
    "jinja2": {"engines"},
    "xxhash": {"layout", "handoff", "handshake", "engines", "testing"},
    "transformers": {"cli"},
    "rich": {"cli"},
    "vllm": {"engines", "cli"},
    "pytest": {"testing"},
    "hypothesis": {"testing"},
}
"""The top-level rooms that may import a library."""

NO_THIRD_PARTY: Mapping[str, set[str]] = {
    "torch": {"engines.mini.scheduling", "engines.mini.server", "engines.mini.api", "engines.mini.step"},
    "aiohttp": {"engines.mini.scheduling", "engines.mini.compute", "engines.mini.ranks"},
    "zmq": {"handoff", "connector"},
    "socket": {"handoff", "connector", "layout", "wire", "handshake"},
    "select": {"handoff", "connector", "layout", "wire", "handshake"},
    "threading": {"handoff.decode", "handoff.prefill", "handoff.rank_protocol", "layout", "wire"},
    "time": {"handoff.decode", "handoff.prefill", "handoff.rank_protocol", "handshake", "layout", "wire"},
}
"""Rooms in which a library is forbidden although their home may use it: machines do no I/O and read no clock."""

MAX_MODULES = 16
"""A folder with more modules than this is a heap."""

MAY_OCCUR_TWICE: Mapping[str, str] = {
    "app": "an HTTP application",
    "base": "the port of its room",
    "draining": "the drain of a server",
    "engine": "an engine, or the object that stands for one",
    "facts": "the facts of an engine: the records, and the command that shows them",
    "machine": "the two state machines of a hand-off",
    "messages": "the messages that each of the two machines sends",
    "metrics": "Prometheus series",
    "plan": "`kvferry plan`, and its benchmark",
    "scheduler": "a scheduler half, or the scheduler of an engine",
    "settings": "the settings of its room",
    "worker": "a worker half, or a worker as its room sees it",
}
"""Module names that two rooms may use, because they mean the same kind of thing in both."""

_ENGINES = {"engines.mini": "mini", "engines.vllm": "vllm"}


@dataclass(frozen=True)
class Tree:
    """The sources of one package. `root` is the package's folder."""

    root: Path
    package: str = "kvferry"

    @cached_property
    def modules(self) -> dict[str, Path]:
        """Every module by its dotted name, without the package's; a package stands for its __init__.py."""
        found = {}
        for path in sorted(self.root.rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return found

    def imports(self, module: str) -> Iterator[tuple[str, int]]:
        """Every module of the package or of a library that `module` imports, with the line."""
        path = self.modules[module]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                name = node.module or ""
                if node.level:
                    yield f"{'.' * node.level}{name}", node.lineno
                    continue
                for alias in node.names:
                    inner = f"{name}.{alias.name}"
                    known = inner.startswith(f"{self.package}.") and inner[len(self.package) + 1 :] in self.modules
                    yield (inner if known else name), node.lineno

    def targets(self, module: str) -> Iterator[tuple[str, int]]:
        """The modules of the package itself that `module` imports, without the package's name."""
        for name, line in self.imports(module):
            if name == self.package or name.startswith(f"{self.package}."):
                target = name[len(self.package) + 1 :]
                yield (target if target in self.modules else target.rpartition(".")[0]), line


def room_of(module: str, rooms: Mapping[str, set[str]]) -> str | None:
    """The room that a module belongs to; None: the table does not know it."""
    for long, short in _ENGINES.items():
        if module == long or module.startswith(f"{long}."):
            module = short + module[len(long) :]
    parts = module.split(".") if module else []
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in rooms:
            return name
    return "" if not module else None


def forbidden_imports(tree: Tree, rooms: Mapping[str, set[str]] = ROOMS) -> list[str]:
    """Imports that the table does not allow, modules without a room, and relative imports."""
    wrong = []
    for module, path in tree.modules.items():
        home = room_of(module, rooms)
        if home is None:
            wrong.append(f"{path.relative_to(tree.root)} is in no room of the table: add it, with what it may import")
            continue
        for name, line in tree.imports(module):
            if name.startswith("."):
                wrong.append(f"{path.relative_to(tree.root)}:{line}: relative import")
        for target, line in tree.targets(module):
            room = room_of(target, rooms)
            allowed = rooms[home]
            if room is None or room == home or "*" in allowed or room in allowed:
                continue
            if module and target.startswith(f"{module}."):
                continue  # a package may name its own modules
            wrong.append(f"{path.relative_to(tree.root)}:{line}: {home or 'kvferry'} must not import {room or target}")
    return wrong


def forbidden_libraries(
    tree: Tree,
    homes: Mapping[str, set[str]] = THIRD_PARTY_HOMES,
    never: Mapping[str, set[str]] = NO_THIRD_PARTY,
) -> list[str]:
    """Libraries that are imported outside their homes, or in a room that must do without them."""
    wrong = []
    for module, path in tree.modules.items():
        for name, line in tree.imports(module):
            top = name.split(".")[0]
            if top == tree.package or not top:
                continue
            where = f"{path.relative_to(tree.root)}:{line}"
            if top not in sys.stdlib_module_names:
                if top not in homes:
                    wrong.append(f"{where}: {top} has no home in the table")
                elif module.split(".")[0] not in homes[top]:
                    wrong.append(f"{where}: {module.split('.')[0]} must not import {top}")
            for room in never.get(top, ()):
                if module == room or module.startswith(f"{room}."):
                    wrong.append(f"{where}: {room} must not import {top}")
    return wrong


def circles(tree: Tree) -> list[str]:
    """Groups of modules that import each other in a circle, type-only imports included."""
    edges = {module: {target for target, _ in tree.targets(module) if target != module} for module in tree.modules}
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        todo = list(edges[start])
        while todo:
            one = todo.pop()
            if one not in seen:
                seen.add(one)
                todo += edges.get(one, ())
        reach[start] = seen
    return [
        f"{one} and {other} import each other, directly or through others"
        for one, other in combinations(sorted(edges), 2)
        if other in reach[one] and one in reach[other]
    ]


def crowded_folders(tree: Tree, limit: int = MAX_MODULES) -> list[str]:
    """Folders with more than `limit` modules; __init__.py does not count."""
    counts = Counter(path.parent for path in tree.modules.values() if path.name != "__init__.py")
    return [
        f"{folder.relative_to(tree.root)} holds {count} modules: make rooms inside it"
        for folder, count in sorted(counts.items())
        if count > limit
    ]


def repeated_names(tree: Tree, allowed: Sequence[str] | Mapping[str, str] = MAY_OCCUR_TWICE) -> list[str]:
    """Names of modules that occur more than once and are not in the list of those that may."""
    names: dict[str, list[str]] = {}
    for module, path in tree.modules.items():
        if path.name not in {"__init__.py", "__main__.py"}:
            names.setdefault(path.stem, []).append(module)
    return [
        f"{name} names {len(modules)} modules: {', '.join(modules)}"
        for name, modules in sorted(names.items())
        if len(modules) > 1 and name not in allowed
    ]
