"""Writes the reference pages that are made from code (`make docs`).

compatibility.md is made from the table of facts, settings.md from the settings classes, request-fields.md from the
classes of request bodies, the state diagrams of life-of-a-handoff.md from the tables of legal moves, and the table in
route.md from the router's table of outcomes. A test checks that the committed pages are up to date.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from kvferry import settings
from kvferry.cli.main import ExitCode
from kvferry.cli.support.router_flags import router_flag
from kvferry.cli.support.worker_flags import FLAGS
from kvferry.engines.mini.server.request_body import ChatBody, CompletionBody, StreamOptions
from kvferry.engines.mini.server.request_fields import Done, Field, fields_of
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.speculation_settings import SpeculationSettings
from kvferry.handoff.transitions import TABLES
from kvferry.handshake.engine_description import EngineDescription
from kvferry.handshake.fact import FactKind, FactSpec
from kvferry.handshake.facts import Facts
from kvferry.handshake.table import FACTS
from kvferry.handshake.verdict import verdict
from kvferry.router.fleet.outcomes import outcome_table
from kvferry.router.settings import RouterSettings
from kvferry.settings import Role, TransferMode
from kvferry.wire.versions import HISTORY

__all__ = [
    "HANDOFF_PAGE",
    "PAGES",
    "ROUTE_PAGE",
    "SETTINGS",
    "compatibility_page",
    "field_texts",
    "flag_of",
    "handoff_page",
    "main",
    "request_fields_page",
    "route_page",
    "settings_page",
    "with_diagrams",
]

SETTINGS: tuple[tuple[str, type], ...] = (
    ("", settings.FerrySettings),
    ("transfer", settings.TransferSettings),
    ("lease", settings.LeaseSettings),
    ("side_channel", settings.SideChannelSettings),
    ("fetch", settings.FetchSettings),
    ("engine", EngineSettings),
    ("speculation", SpeculationSettings),
    ("router", RouterSettings),
)
"""Every class of settings, after the name of its part."""

_INTRO = """<!-- Made by `make docs` from kvferry.handshake.table. Do not edit. -->
# Compatibility

Before anything else, two engines compare *facts*: named, effective values (`auto` is resolved, `fp8` is `fp8_e4m3`).
`kvferry compare A B` makes the same comparison on the command line, and `kvferry doctor URL...` makes it for a whole
fleet.

* **must match**: the bytes would mean something else. If such a fact differs, the pair is refused at the handshake,
  before any memory is registered and before any request.
* **bridged**: the two sides may differ. The planner reconciles them, at the price that the table gives.
* **informative**: shown to people, and never a reason to refuse.

*strict* marks facts that must match only when either side runs with `--strict`. Then every factor of vLLM's
compatibility hash must match.

A refusal gives, for each fact that differs, both values, which side to change, and the setting. For example, if decode
was started with `--kv-dtype fp8_e4m3`:

```text
{refusal}
```

The side to change is decode, which takes prefill's value. If one side has nothing (no drafter), it is that side; if a
version differs, it is the side with the older one. A side that has no setting for the fact is not asked to change.
"""

_OTHERS = """
## Other reasons for a refusal

| refusal | when | what to do |
| --- | --- | --- |
| there is no common version | the ranges of protocol versions do not overlap | upgrade kvferry on the older side |
| layer ... is not offered by any rank of the peer | decode needs a layer, or a part of one, that prefill lacks | \
serve the same model, with the same draft model, on both sides |
| cannot be paired | layouts contradict each other, or are malformed | the message names layer, part and range |
| moves bytes by ... | the transports differ | set the same `--transport` on both sides |
| two engines have the id | two running engines use one id | give each its own `--engine-id` |
| answers as ... and not as ... | a request names a wrong address | correct the router's list of workers |
| already has ... peers | there are more than `side_channel.max_peers` | raise it, or start more engines |
| gave no answer | the peer is not running, its port is closed, or it has another key | \
use the same `--key-file` on all engines |

A refused peer is asked again after a back-off that doubles from 2 s to 30 s, or at once when it has restarted.

## Protocol versions

The envelope never changes, so peers of any two releases can tell each other why they do not fit. They speak the highest
version that both know. `--protocol-max` limits a worker to an older one.

| version | what it changed |
| --- | --- |
"""


def _sample_refusal() -> str:
    """Returns the refusal of two embedded engines whose KV dtypes differ, as users see it."""
    shared = EngineDescription(
        engine="mini",
        engine_version="1",
        role=Role.PREFILL,
        mode=TransferMode.PULL,
        model_id="smollm2",
        dtype="bfloat16",
        total_kv_heads=3,
        head_size=64,
        hidden_layers=30,
        attention_backend="TORCH",
    )
    prefill = Facts.from_engine(shared)
    decode = Facts.from_engine(replace(shared, role=Role.DECODE, kv_dtype="fp8_e4m3"))
    return verdict(prefill, decode).refusal("'prefill-0'", "'decode-0'")


def compatibility_page() -> str:
    """Returns the text of docs/reference/compatibility.md (R37)."""
    parts = [_INTRO.replace("{refusal}", textwrap.fill(_sample_refusal(), 116, break_on_hyphens=False))]
    for kind in FactKind:
        rows = [spec for spec in FACTS.values() if spec.kind is kind]
        price = {
            FactKind.MUST_MATCH: "what would go wrong",
            FactKind.BRIDGED: "how it is bridged, and at what price",
            FactKind.INFORMATIVE: "why it cannot matter",
        }[kind]
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
    mini = _setting(spec.settings.get("mini", other))
    template = spec.settings.get("vllm", other)
    vllm = " or ".join(_setting(template.replace("{value}", name)) for name in spec.vllm_values.values() or ["{value}"])
    reason = (
        f"{spec.reason}. Exception: {spec.may_lack} may have none: {spec.lacking}" if spec.may_lack else spec.reason
    )
    rules = " ".join(_rule_link(rule) for rule in spec.rules.split())
    cells = (f"`{spec.name}`{strict}", spec.meaning, reason, mini, vllm, rules or " ")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _setting(text: str) -> str:
    if text.startswith("kvferry serve has no setting"):
        return "-"
    return f"`{text.removeprefix('kvferry serve ')}`" if text.startswith(("-", "kvferry", "VLLM_")) else text


def _rule_link(rule: str) -> str:
    return f"[{rule}](rules.md#{rule.lower()})"


_OTHER_FLAGS = {
    (EngineSettings, "model"): "MODEL",
    (EngineSettings, "cache_bytes"): "--cache-gb",
    (EngineSettings, "prefix_caching"): "--no-prefix-caching",
    (EngineSettings, "speculation"): "--speculative-config",
    (settings.FerrySettings, "strict"): "--strict",
}
_WORKER_FLAGS = {(flag.part, flag.field): f"--{flag.name}" for flag in FLAGS} | _OTHER_FLAGS


def flag_of(part: type, field: str) -> str | None:
    """Returns what sets a field on the command line: of `kvferry route` or `kvferry serve`.

    It is a flag, or a positional argument in capitals, or None if there is none. The fields of SpeculationSettings are
    keys of one flag's JSON value.
    """
    if part is RouterSettings:
        return f"--{router_flag(field)}"
    if part is SpeculationSettings:
        return f"--speculative-config '{{\"{field}\": ...}}'"
    return _WORKER_FLAGS.get((part, field))


_SETTINGS_INTRO = """<!-- Made by `make docs` from the settings classes. Do not edit. -->
# Settings

The *flag* column gives the flag of `kvferry serve` that sets a value; for the part `router` it is a flag of `kvferry
route`. A setting without a flag can only be set in Python. A value out of range is refused at start, with its name and
the range.

A setting whose name ends in `_s` is in seconds, and one that ends in `_bytes` is in bytes.
"""


def settings_page() -> str:
    """Returns the text of docs/reference/settings.md."""
    parts = [_SETTINGS_INTRO]
    for part, cls in SETTINGS:
        texts = field_texts(cls)
        parts.append(f"\n## {part or 'Top level'}\n\n{_linked(_one_line(inspect.getdoc(cls) or ''))}\n")
        parts.append("\n| setting | flag | default | what it is |\n| --- | --- | --- | --- |\n")
        for field in dataclasses.fields(cls):
            name = f"{part}.{field.name}" if part else field.name
            flag = flag_of(cls, field.name)
            cells = (f"`{name}`", f"`{flag}`" if flag else "-", _default(field), _linked(texts[field.name]))
            parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")
    return "".join(parts)


def _linked(text: str) -> str:
    """Links the rules that a text names."""
    return re.sub(r"\bR\d+\b", lambda found: _rule_link(found[0]), text)


def field_texts(cls: type) -> dict[str, str]:
    """Returns the text beneath each field. A field without a text has no entry."""
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
    # A part of the settings is made by its own class, and has a section of its own.
    return "required" if field.default_factory is dataclasses.MISSING else f"[below](#{field.name})"


_FIELDS_INTRO = """<!-- Made by `make docs` from kvferry.engines.mini.server.request_body. Do not edit. -->
# Request fields

What a worker of the embedded engine does with each field of the bodies of `/v1/completions` and
`/v1/chat/completions`. No field is ignored in silence: one that is not done, and one that is not listed here, gets 400
with code `unsupported`, its name and the remedy, on both endpoints. A value of another type gets 400 `invalid_type`,
and one out of its range 400 `out_of_range`. `null` is the same as leaving the field out.

The same holds inside a message of a chat. `role`, `content` and `tool_call_id` may always be there. Any other field,
such as `name` or `tool_calls`, gets 400 `unsupported` if the model's chat template does not read it, because the model
would never see it; null and empty values ask for nothing. A part of `content` has `type` `text` and its `text`.

The router passes all fields on as they came. What a vLLM worker does with them, vLLM's documentation says.

## Done

| field | where | type | range | default | meaning |
| --- | --- | --- | --- | --- | --- |
"""
_REFUSED_INTRO = """
## Not done

A value other than those in the second column gets 400 `unsupported`.

| field | accepted | what to do instead |
| --- | --- | --- |
"""
_ACCEPTED_INTRO = """
## Accepted because it changes no answer

| field | why |
| --- | --- |
"""


def request_fields_page() -> str:
    """Returns the text of docs/reference/request-fields.md."""
    bodies = {"completions": fields_of(CompletionBody), "chat": fields_of(ChatBody)}
    options = {f"stream_options.{name}": found for name, found in fields_of(StreamOptions).items()}
    found: dict[str, tuple[str, Field, str, list[str]]] = {}
    for where, fields in (*bodies.items(), *((where, options) for where in bodies)):
        for name, (entry, hint) in fields.items():
            row = (name, entry, _type_text(hint), list[str]())
            found.setdefault(f"{name} {entry} {hint}", row)[-1].append(where)
    rows: dict[Done, list[str]] = {does: [] for does in Done}
    for _, (name, entry, kind, places) in sorted(found.items()):
        only = "" if len(places) == 2 else f" ({places[0]})"
        meaning = entry.meaning[:1].upper() + entry.meaning[1:]
        cells: tuple[str, ...] = (f"`{name}`{only}", meaning)
        if entry.does is Done.YES:
            limits = [entry.range_text] if entry.range_text else []
            limits += [f"at most {entry.max_items} entries"] if entry.max_items is not None else []
            limits += [f"strings of at most {entry.max_chars} characters"] if entry.max_chars is not None else []
            default = "required" if name in ("prompt", "messages") else entry.default or "-"
            where = "both" if len(places) == 2 else places[0]
            cells = (f"`{name}`", where, f"`{kind}`", "; ".join(limits) or "-", default, meaning)
        elif entry.does is Done.NO:
            values = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in entry.nothing)
            cells = (cells[0], values, meaning)
        rows[entry.does].append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")
    heads = {Done.YES: _FIELDS_INTRO, Done.NO: _REFUSED_INTRO, Done.CHANGES_NOTHING: _ACCEPTED_INTRO}
    return "".join(head + "".join(rows[does]) for does, head in heads.items())


def _type_text(hint: object) -> str:
    """Returns a type as a reader of JSON knows it."""
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    for long, short in (("kvferry.settings.FailurePolicy", "str"), (" | None", ""), ("typing.", "")):
        text = text.replace(long, short)
    return re.sub(r"kvferry[.\w]*\.(\w+)", "object", text)


HANDOFF_PAGE = "explanation/life-of-a-handoff.md"
ROUTE_PAGE = "how-to/route.md"
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


def route_page() -> str:
    """Returns docs/how-to/route.md, as it is but for its table of outcomes."""
    text = (_DOCS / ROUTE_PAGE).read_text()
    begin, end = "<!-- Made by `make docs` from kvferry.router.fleet.outcomes. -->", "<!-- End of outcomes. -->"
    region = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    return region.sub(_always(f"{begin}\n\n{outcome_table()}\n\n{end}"), text)


PAGES: dict[str, Callable[[], str]] = {
    "reference/compatibility.md": compatibility_page,
    "reference/settings.md": settings_page,
    "reference/request-fields.md": request_fields_page,
    HANDOFF_PAGE: handoff_page,
    ROUTE_PAGE: route_page,
}
"""Maps a page in docs/ to the function that makes its text."""


def main(argv: Sequence[str] | None = None) -> ExitCode:
    """Writes the pages; with --check, only reports which are out of date."""
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
