"""The reference pages that are made from code: `make docs` writes them.

compatibility.md from the table of facts, settings.md from the settings classes, and the state diagrams of
life-of-a-handoff.md from the tables of legal moves. A test holds the committed pages to it.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from kvferry import settings
from kvferry.cli.main import ExitCode
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.speculation_settings import SpeculationSettings
from kvferry.handoff.transitions import TABLES
from kvferry.handshake.fact import FactKind, FactSpec
from kvferry.handshake.table import FACTS
from kvferry.router.settings import RouterSettings
from kvferry.wire.versions import HISTORY

__all__ = [
    "HANDOFF_PAGE",
    "PAGES",
    "SETTINGS",
    "compatibility_page",
    "field_texts",
    "handoff_page",
    "main",
    "settings_page",
    "with_diagrams",
]

SETTINGS: tuple[tuple[str, type], ...] = (
    ("", settings.FerrySettings),
    ("transfer", settings.TransferSettings),
    ("lease", settings.LeaseSettings),
    ("side_channel", settings.SideChannelSettings),
    ("engine", EngineSettings),
    ("speculation", SpeculationSettings),
    ("router", RouterSettings),
)
"""Every class of settings, and the name of its part."""

_INTRO = """<!-- Made by `make docs` from kvferry.handshake.table. Do not edit. -->
# Compatibility

Before anything else, two engines compare *facts*: named, effective values (`auto` is resolved, `fp8` is `fp8_e4m3`).
`kvferry compare A B` makes the same comparison from the command line, and `kvferry doctor URL...` for a whole fleet.

* **must match**: the bytes would mean something else. A difference refuses the pair at the handshake, before any memory
  is registered and before any request.
* **bridged**: each side may have its own; the planner reconciles them, at the price that is named.
* **informative**: shown, and never more.

*strict* marks what must match too with `--strict` on either side: every factor of vLLM's compatibility hash, as far as
it is not one anyway. A refusal says, for each fact that differs, both values, which side to change, and the setting:

    'prefill-0' and 'decode-0' cannot share a cache: kv.dtype: 'prefill-0'='bfloat16' 'decode-0'='fp8_e4m3',
    change it on 'decode-0': --kv-cache-dtype bfloat16

The side to change is decode, which takes what prefill has; where one side has nothing (a drafter), the side that has
nothing; where a version differs, the older one. A side that has no setting for it is not asked to change.
"""

_OTHERS = """
## What else a handshake can refuse

| refusal | when | what to do |
| --- | --- | --- |
| there is no common version | the ranges of protocol versions do not meet | upgrade kvferry on the older side |
| layer ... is not offered by any rank of the peer | decode needs a layer, or a part of one, that prefill has not | \
serve the same model, with the same draft model, on both sides |
| cannot be paired | layouts contradict each other, or are malformed | the message names layer, part and range |
| moves bytes by ... | the transports differ | set the same `transfer.transport` on both sides |
| two engines have the id | one id, two running engines | give each its own `--engine-id` |
| answers as ... and not as ... | a request names a wrong address | mend the router's list of workers |
| already has ... peers | more than `side_channel.max_peers` | raise it, or add engines |
| gave no answer | not running, port closed, or another key | the same `--key-file` on all engines |

A refused peer is asked again after a back-off that doubles from 2 s to 30 s, and at once when it has restarted.

## Protocol versions

The envelope never changes, so peers of any two releases can tell each other why they do not fit. They speak the highest
version that both know; `side_channel.protocol_max` holds a worker at an older one.

| version | what it changed |
| --- | --- |
"""


def compatibility_page() -> str:
    """docs/reference/compatibility.md (R37)."""
    parts = [_INTRO]
    for kind in FactKind:
        rows = [spec for spec in FACTS.values() if spec.kind is kind]
        price = (
            "else" if kind is FactKind.MUST_MATCH else "how, and at what price" if kind is FactKind.BRIDGED else "why"
        )
        parts.append(
            f"\n## {str(kind).capitalize()}\n\n| fact | what it is | {price} | kvferry serve | vLLM | rules |\n"
        )
        parts.append("| --- | --- | --- | --- | --- | --- |\n")
        parts.extend(_fact_row(spec) for spec in rows)
    parts.append(_OTHERS)
    parts.extend(f"| {version} | {line} |\n" for version, line in HISTORY.items())
    return "".join(parts)


def _fact_row(spec: FactSpec) -> str:
    strict = " *strict*" if spec.strict and spec.kind is not FactKind.MUST_MATCH else ""
    other = spec.settings.get("", "")
    mini, vllm = (_setting(spec.settings.get(engine, other)) for engine in ("mini", "vllm"))
    why = f"{spec.why}; {spec.may_lack} may have none: {spec.lacking}" if spec.may_lack else spec.why
    cells = (f"`{spec.name}`{strict}", spec.meaning, why, mini, vllm, spec.rules or " ")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _setting(text: str) -> str:
    if text.startswith("kvferry serve has no setting"):
        return "-"
    return f"`{text.removeprefix('kvferry serve ')}`" if text.startswith(("-", "kvferry", "VLLM_")) else text


_SETTINGS_INTRO = """<!-- Made by `make docs` from the settings classes. Do not edit. -->
# Settings

Defaults stand in the classes and nowhere else. A value out of range is refused at start, with its name and the range.
"""


def settings_page() -> str:
    """docs/reference/settings.md."""
    parts = [_SETTINGS_INTRO]
    for part, cls in SETTINGS:
        texts = field_texts(cls)
        parts.append(f"\n## {part or 'Top level'}\n\n{_one_line(inspect.getdoc(cls) or '')}\n")
        parts.append("\n| setting | default | what it is |\n| --- | --- | --- |\n")
        for field in dataclasses.fields(cls):
            name = f"{part}.{field.name}" if part else field.name
            parts.append(f"| `{name}` | {_default(field)} | {texts[field.name].replace('|', chr(92) + '|')} |\n")
    return "".join(parts)


def field_texts(cls: type) -> dict[str, str]:
    """The text beneath each field. A field without one has no entry."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef), "the source of a class is a class"
    texts = {}
    for node, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _is_text(below):
            texts[node.target.id] = _one_line(ast.literal_eval(below.value))  # type: ignore[attr-defined]  # an Expr
    return texts


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _default(field: "dataclasses.Field[object]") -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default}`"
    return "(its own section)"


HANDOFF_PAGE = "explanation/life-of-a-handoff.md"
_DOCS = Path(__file__).parents[4] / "docs"
_BEGIN, _END = "<!-- Made by `make docs` from kvferry.handoff.transitions: {name}. -->", "<!-- End of {name}. -->"


def with_diagrams(text: str) -> str:
    """Returns the page with each diagram in its marked region. Raises ValueError if a region is missing."""
    for table in TABLES:
        begin, end = (mark.format(name=table.name) for mark in (_BEGIN, _END))
        region = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        made = f"{begin}\n```mermaid\n{table.diagram()}\n```\n{end}"
        text, count = region.subn(_always(made), text)
        if count != 1:
            raise ValueError(f"{HANDOFF_PAGE} has {count} regions {begin!r} ... {end!r}; it needs one")
    return text


def _always(made: str) -> Callable[[re.Match[str]], str]:
    return lambda _: made


def handoff_page() -> str:
    """Returns docs/explanation/life-of-a-handoff.md, as it is but for its diagrams."""
    return with_diagrams((_DOCS / HANDOFF_PAGE).read_text())


PAGES: dict[str, Callable[[], str]] = {
    "reference/compatibility.md": compatibility_page,
    "reference/settings.md": settings_page,
    HANDOFF_PAGE: handoff_page,
}
"""Page beneath docs/, and what makes it."""


def main(argv: Sequence[str] | None = None) -> ExitCode:
    """Write the pages; with --check, only say which are out of date."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.cli.support.reference_pages", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR", help="the docs folder (default: docs)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page is out of date")
    args = parser.parse_args(argv)
    stale = 0
    for name, make in PAGES.items():
        path, text = args.out / name, make()
        if path.is_file() and path.read_text() == text:
            continue
        stale += 1
        if args.check:
            print(f"{path} is out of date: make docs", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path}", file=sys.stderr)
    return ExitCode.ERROR if args.check and stale else ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
