"""Decides whether two engines can share a cache; if not, says which fact differs, which side to change, and how (R1,
R10).

The handshake, the router and the command line use this one function. It is symmetric: verdict(b, a) is verdict(a, b)
mirrored. It is total: it answers for any two Facts, even if a peer knows other facts than this release does.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvferry.handshake.fact import NO_SETTING, NO_SETTING_ON_EITHER, Change, FactKind, FactSpec
from kvferry.handshake.facts import Facts
from kvferry.handshake.table import FACTS
from kvferry.handshake.table_speculation import speculative_config
from kvferry.handshake.values import FactValue, canonical
from kvferry.settings import Role
from kvferry.wire.versions import FIND

__all__ = ["Row", "Side", "Verdict", "VerdictKind", "is_strict", "show", "verdict"]


_HARMLESS = re.compile(r"[\w./:@,=+\-{}\[\]\" ]{1,300}", re.ASCII)


class VerdictKind(StrEnum):
    """The answer in one word."""

    COMPATIBLE = "compatible"
    NOTES = "notes"
    """Compatible, with differences that are bridged."""
    REFUSED = "refused"


class Side(StrEnum):
    """Which of the two engines must change."""

    A = "a"
    B = "b"
    EITHER = "either"

    @property
    def other(self) -> "Side":
        """The same engine, seen from the other side."""
        return {Side.A: Side.B, Side.B: Side.A, Side.EITHER: Side.EITHER}[self]


@dataclass(frozen=True, slots=True)
class Row:
    """One fact that differs."""

    fact: str
    kind: FactKind
    a: FactValue
    b: FactValue
    change: Side
    """The side that should change. For a bridged or informative fact neither needs to."""
    remedy_a: str
    """The setting that gives a the value of b."""
    remedy_b: str
    """The setting that gives b the value of a."""
    reason: str
    """What would go wrong, how it is bridged, or why it cannot matter."""

    def mirrored(self) -> "Row":
        """Returns the row as the other side sees it."""
        return Row(self.fact, self.kind, self.b, self.a, self.change.other, self.remedy_b, self.remedy_a, self.reason)

    def remedy(self, a: str = "a", b: str = "b") -> str:
        """Returns which side to change, and how; if nothing needs to change, how the difference is bridged.

        `a` and `b` are the names of the sides.
        """
        if self.kind is not FactKind.MUST_MATCH:
            return f"nothing to do: {self.reason}"
        if self.change is Side.A:
            return f"on {a}: {self.remedy_a}"
        if self.change is Side.B:
            return f"on {b}: {self.remedy_b}"
        return f"on {a}: {self.remedy_a}, or on {b}: {self.remedy_b}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer, with one row per fact that differs, in the order of the table."""

    kind: VerdictKind
    rows: tuple[Row, ...]

    @property
    def refused(self) -> bool:
        """Whether the pair must not share a cache."""
        return self.kind is VerdictKind.REFUSED

    def mirrored(self) -> "Verdict":
        """Returns the verdict as the other side sees it."""
        return Verdict(self.kind, tuple(row.mirrored() for row in self.rows))

    def blocking(self) -> tuple[Row, ...]:
        """Returns the rows for which the pair is refused."""
        return tuple(row for row in self.rows if row.kind is FactKind.MUST_MATCH)

    def notes(self) -> tuple[str, ...]:
        """Returns what is bridged and how, one sentence per fact, for the log and for an engine's description."""
        return tuple(f"{row.fact}: {row.reason}" for row in self.rows if row.kind is FactKind.BRIDGED)

    def explain(self, a: str = "a", b: str = "b") -> str:
        """Returns the verdict as text: one line for the answer, and one per row."""
        head = {
            VerdictKind.COMPATIBLE: f"{a} and {b} can share a cache",
            VerdictKind.NOTES: f"{a} and {b} can share a cache; what differs is bridged",
            VerdictKind.REFUSED: f"{a} and {b} cannot share a cache",
        }[self.kind]
        rows = self.blocking() if self.refused else self.rows
        lines = [f"  {row.fact}: {a}={show(row.a)} {b}={show(row.b)}; {row.remedy(a, b)}" for row in rows]
        if self.refused:
            lines = [f"{line} (else {row.reason})" for line, row in zip(lines, rows, strict=True)]
        return "\n".join([head, *lines])

    def refusal(self, local: str, remote: str, local_is_a: bool = True) -> str:
        """Returns one line for an error: which engines do not fit, and every fact that must match but differs (R10)."""
        a, b = (local, remote) if local_is_a else (remote, local)
        facts = "; ".join(
            f"{row.fact}: {a}={show(row.a)} {b}={show(row.b)}, change it {row.remedy(a, b)}" for row in self.blocking()
        )
        return f"{local} and {remote} cannot share a cache: {facts}"

    def to_json(self) -> dict[str, object]:
        """Returns `verdict`, and `rows` with `fact`, `class`, `a`, `b`, `change`, `remedy` and `why`, ready for
        JSON."""
        return {
            "verdict": str(self.kind),
            "rows": [
                {
                    "fact": row.fact,
                    "class": str(row.kind),
                    "a": list(row.a) if isinstance(row.a, tuple) else row.a,
                    "b": list(row.b) if isinstance(row.b, tuple) else row.b,
                    "change": str(row.change),
                    "remedy": row.remedy(),
                    "why": row.reason,
                }
                for row in self.rows
            ],
        }


def show(value: FactValue) -> str:
    """Returns a value as people read it: text in quotes, None as `none`, and long text cut off."""
    text = "none" if value is None else canonical(value) if not isinstance(value, str) else ascii(value)
    return text if len(text) <= 160 else f"{text[:150]}... ({len(text)} characters)"


def is_strict(a: Facts, b: Facts) -> bool:
    """Returns whether either side is strict: then both compare strictly, so that they give the same answer."""
    return a.get("handshake.strict") is True or b.get("handshake.strict") is True


def verdict(a: Facts, b: Facts, *, strict: bool = False) -> Verdict:
    """Compares two engines. With `strict` every factor of R2 must match, as if one of them ran with --strict."""
    strict = strict or is_strict(a, b)
    names = [name for name in FACTS if name in a or name in b]
    names += sorted({fact.name for fact in (*a, *b)} - FACTS.keys())
    rows = []
    for name in names:
        spec = FACTS.get(name)
        if _agree(spec, a.get(name), b.get(name)) or _covered_by_parent(spec, a, b):
            continue
        rows.append(_row(name, spec, _kind(name, spec, a, b, strict), a, b))
    if any(row.kind is FactKind.MUST_MATCH for row in rows):
        return Verdict(VerdictKind.REFUSED, tuple(rows))
    bridged = any(row.kind is FactKind.BRIDGED for row in rows)
    return Verdict(VerdictKind.NOTES if bridged else VerdictKind.COMPATIBLE, tuple(rows))


def _agree(spec: FactSpec | None, a: FactValue, b: FactValue) -> bool:
    if spec is not None and spec.complement:
        return {a, b} == {str(Role.PREFILL), str(Role.DECODE)} or str(Role.BOTH) in (a, b)
    return canonical(a) == canonical(b)


def _covered_by_parent(spec: FactSpec | None, a: Facts, b: Facts) -> bool:
    """Whether the fact is a detail of one that a side does not have at all: the row of that fact is enough."""
    return spec is not None and spec.part_of is not None and (spec.part_of in a) != (spec.part_of in b)


def _kind(name: str, spec: FactSpec | None, a: Facts, b: Facts, strict: bool) -> FactKind:
    """Returns the strictest class that either side or our table gives the fact, so that a peer cannot weaken it."""
    kinds = [kind for kind in (a.kind(name), b.kind(name)) if kind is not None]
    if spec is not None:
        if strict and spec.strict:
            return FactKind.MUST_MATCH
        if _may_lack(spec, a, b) or (spec.complement and _may_fetch(a, b)):
            return FactKind.BRIDGED
        if spec.settled_by is None or not (spec.settled_by in a and spec.settled_by in b):
            kinds.append(spec.kind)
    return min(kinds, key=list(FactKind).index)


def _may_fetch(a: Facts, b: Facts) -> bool:
    """Whether the two may at least fetch prefixes from each other (R39): for that no role is needed."""
    protocols = (a.get("protocol"), b.get("protocol"))
    return all(isinstance(newest, int) and newest >= FIND for newest in protocols)


def _may_lack(spec: FactSpec, a: Facts, b: Facts) -> bool:
    """Whether exactly one side lacks the fact, and it is the side that may."""
    value_a, value_b = a.get(spec.name), b.get(spec.name)
    if spec.may_lack is None or (value_a is None) == (value_b is None):
        return False
    without, other = (a, b) if value_a is None else (b, a)
    opposite = {str(Role.PREFILL), str(Role.DECODE)} - {str(spec.may_lack)}
    return without.get("role") == spec.may_lack or other.get("role") in opposite


def _row(name: str, spec: FactSpec | None, kind: FactKind, a: Facts, b: Facts) -> Row:
    value_a, value_b = a.get(name), b.get(name)
    if spec is None:
        text = f"upgrade kvferry: only the other side knows the fact {name!a}"
        change = Side.A if value_a is None else Side.B if value_b is None else Side.EITHER
        return Row(name, kind, value_a, value_b, change, text, text, "only one side's release compares it")
    reason = spec.reason
    if kind is FactKind.MUST_MATCH and spec.kind is not FactKind.MUST_MATCH:
        reason = "strict mode compares it; without --strict it is bridged"
    if kind is FactKind.BRIDGED and spec.kind is FactKind.MUST_MATCH:
        reason = spec.lacking
    remedy_a, remedy_b = _remedy(spec, a, b), _remedy(spec, b, a)
    change = _change(spec.change, name, a, b)
    if remedy_a == remedy_b == NO_SETTING:
        remedy_a = remedy_b = NO_SETTING_ON_EITHER
    elif NO_SETTING in (remedy_a, remedy_b):
        change = Side.B if remedy_a == NO_SETTING else Side.A
    return Row(name, kind, value_a, value_b, change, remedy_a, remedy_b, reason)


def _change(change: Change, name: str, a: Facts, b: Facts) -> Side:
    """Returns the side that should change. It depends only on the facts, so both sides name the same one."""
    value_a, value_b = a.get(name), b.get(name)
    if change is Change.OLDER:
        return _lower(value_a, value_b)
    if change is Change.ABSENT and (value_a is None) != (value_b is None):
        return Side.A if value_a is None else Side.B
    if change is not Change.EITHER:
        roles = (a.get("role"), b.get("role"))
        if roles[0] == Role.DECODE and roles[1] != Role.DECODE:
            return Side.A
        if roles[1] == Role.DECODE and roles[0] != Role.DECODE:
            return Side.B
        if roles[0] == Role.PREFILL and roles[1] == Role.BOTH:
            return Side.B
        if roles[1] == Role.PREFILL and roles[0] == Role.BOTH:
            return Side.A
    return Side.EITHER


def _lower(a: FactValue, b: FactValue) -> Side:
    """Returns the side with the older version, or EITHER if the two cannot be ordered."""
    key_a, key_b = _version_key(a), _version_key(b)
    return Side.EITHER if key_a == key_b else Side.A if key_a < key_b else Side.B


def _version_key(value: FactValue) -> list[int]:
    if isinstance(value, bool | float | tuple) or value is None:
        return []
    digits = "".join(char if char.isascii() and char.isdigit() else " " for char in str(value))
    return [int(part[:9]) for part in digits.split()]


def _remedy(spec: FactSpec, to_change: Facts, other: Facts) -> str:
    """Returns what to type on the side of `to_change`, to fit the value of `other`."""
    settings: Mapping[str, str] = spec.settings
    engine = to_change.get("engine.name")
    template = settings.get(engine if isinstance(engine, str) else "", settings.get("", "set it to {value}"))
    value, model = other.get(spec.name), other.get("model.id")
    if "{speculative_config}" in template:
        config = speculative_config(str(engine), other.get)
        if config is None:
            return "remove --speculative-config, as the other side has none"
        return template.replace("{speculative_config}", config)
    if spec.complement and value is not None:
        value = str(Role.DECODE if value == Role.PREFILL else Role.PREFILL)
    if value is None and "{value}" in template:
        text = _fill(template, "...", "...").removeprefix("kvferry serve ")
        return f"remove {text}, as the other side has none" if text.startswith("-") else text
    typed = _typed(value)
    if engine != "mini":
        typed = spec.vllm_values.get(value, typed)
    return _fill(template, typed, _typed(model) if isinstance(model, str) else "the same model")


def _fill(template: str, value: str, model: str) -> str:
    """Fills in both values in one pass, so that braces in a peer's value are left alone."""
    return re.sub(r"\{(value|model)\}", lambda found: value if found[1] == "value" else model, template)


def _typed(value: FactValue) -> str:
    """Returns a value as it is typed in a setting. A peer's value is never shown unquoted if a shell could misread
    it."""
    if isinstance(value, tuple):
        text = ",".join(str(item) for item in value)
    else:
        text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if _HARMLESS.fullmatch(text) else show(text)
