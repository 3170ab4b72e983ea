"""May two engines share a cache, and if not: which fact, both values, which side to change, and how (R1, R10).

One function for the handshake, the router and the command line. Symmetric: verdict(b, a) is verdict(a, b) mirrored.
Total: it answers for any two Facts, also for ones of a peer that knows other facts than we do.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvferry.handshake.fact import NO_SETTING, NO_SETTING_ON_EITHER, Change, FactKind, FactSpec
from kvferry.handshake.facts import Facts
from kvferry.handshake.table import FACTS
from kvferry.handshake.values import FactValue, canonical
from kvferry.settings import Role

__all__ = ["Row", "Side", "Verdict", "VerdictKind", "is_strict", "show", "verdict"]


_HARMLESS = re.compile(r"[\w./:@,=+\-{}\[\]\" ]{1,300}", re.ASCII)


class VerdictKind(StrEnum):
    """The answer in one word."""

    COMPATIBLE = "compatible"
    NOTES = "notes"
    """Compatible, and something is bridged."""
    REFUSED = "refused"


class Side(StrEnum):
    """Which of the two is to change."""

    A = "a"
    B = "b"
    EITHER = "either"

    @property
    def other(self) -> "Side":
        """The same, seen from the other side."""
        return {Side.A: Side.B, Side.B: Side.A, Side.EITHER: Side.EITHER}[self]


@dataclass(frozen=True, slots=True)
class Row:
    """One fact that differs."""

    fact: str
    kind: FactKind
    a: FactValue
    b: FactValue
    change: Side
    """Who should change. For a bridged or informative fact nobody has to."""
    mend_a: str
    """The setting that gives a what b has."""
    mend_b: str
    why: str
    """What would go wrong, how it is bridged, or why it cannot matter."""

    def mirrored(self) -> "Row":
        """As the other side sees it."""
        return Row(self.fact, self.kind, self.b, self.a, self.change.other, self.mend_b, self.mend_a, self.why)

    def remedy(self, a: str = "a", b: str = "b") -> str:
        """Which side to change, and how; `a` and `b` are the sides' names. Nothing to change: how it is bridged."""
        if self.kind is not FactKind.MUST_MATCH:
            return f"nothing to do: {self.why}"
        if self.change is Side.A:
            return f"on {a}: {self.mend_a}"
        if self.change is Side.B:
            return f"on {b}: {self.mend_b}"
        return f"on {a}: {self.mend_a}, or on {b}: {self.mend_b}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer, with a row for each fact that differs, in the table's order."""

    kind: VerdictKind
    rows: tuple[Row, ...]

    @property
    def refused(self) -> bool:
        """The pair must not share a cache."""
        return self.kind is VerdictKind.REFUSED

    def mirrored(self) -> "Verdict":
        """As the other side sees it."""
        return Verdict(self.kind, tuple(row.mirrored() for row in self.rows))

    def blocking(self) -> tuple[Row, ...]:
        """The rows for which the pair is refused."""
        return tuple(row for row in self.rows if row.kind is FactKind.MUST_MATCH)

    def notes(self) -> tuple[str, ...]:
        """What is bridged, and how: a sentence a fact, for the log and for whoever asks an engine about its peers."""
        return tuple(f"{row.fact}: {row.why}" for row in self.rows if row.kind is FactKind.BRIDGED)

    def explain(self, a: str = "a", b: str = "b") -> str:
        """Text of several lines: one for the answer, one for each row."""
        head = {
            VerdictKind.COMPATIBLE: f"{a} and {b} can share a cache",
            VerdictKind.NOTES: f"{a} and {b} can share a cache; what differs is bridged",
            VerdictKind.REFUSED: f"{a} and {b} cannot share a cache",
        }[self.kind]
        rows = self.blocking() if self.refused else self.rows
        lines = [f"  {row.fact}: {a}={show(row.a)} {b}={show(row.b)}; {row.remedy(a, b)}" for row in rows]
        if self.refused:
            lines = [f"{line} (else {row.why})" for line, row in zip(lines, rows, strict=True)]
        return "\n".join([head, *lines])

    def refusal(self, local: str, remote: str, local_is_a: bool = True) -> str:
        """One line for an error: who refuses whom, and every fact that must match and does not (R10)."""
        a, b = (local, remote) if local_is_a else (remote, local)
        facts = "; ".join(
            f"{row.fact}: {a}={show(row.a)} {b}={show(row.b)}, change it {row.remedy(a, b)}" for row in self.blocking()
        )
        return f"{local} and {remote} cannot share a cache: {facts}"

    def to_json(self) -> dict[str, object]:
        """JSON-ready: `verdict`, and `rows` with `fact`, `class`, `a`, `b`, `change`, `remedy`, `why`."""
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
                    "why": row.why,
                }
                for row in self.rows
            ],
        }


def show(value: FactValue) -> str:
    """A value for people: text in quotes, None as `none`; long text is cut."""
    text = "none" if value is None else canonical(value) if not isinstance(value, str) else ascii(value)
    return text if len(text) <= 160 else f"{text[:150]}... ({len(text)} characters)"


def is_strict(a: Facts, b: Facts) -> bool:
    """Strict on one side is strict for the pair, so that both sides give one answer."""
    return a.get("handshake.strict") is True or b.get("handshake.strict") is True


def verdict(a: Facts, b: Facts, *, strict: bool = False) -> Verdict:
    """Compare two engines. `strict`: every factor of R2 must match too, as if one of them had said so."""
    strict = strict or is_strict(a, b)
    names = [name for name in FACTS if name in a or name in b]
    names += sorted({fact.name for fact in (*a, *b)} - FACTS.keys())
    rows = []
    for name in names:
        spec = FACTS.get(name)
        if _agree(spec, a.get(name), b.get(name)) or _said_by_parent(spec, a, b):
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


def _said_by_parent(spec: FactSpec | None, a: Facts, b: Facts) -> bool:
    """The fact is a detail of something that one side does not have at all: that row says it."""
    return spec is not None and spec.part_of is not None and (spec.part_of in a) != (spec.part_of in b)


def _kind(name: str, spec: FactSpec | None, a: Facts, b: Facts, strict: bool) -> FactKind:
    """The strictest of what both sides and our table say: a peer cannot talk a fact down."""
    kinds = [kind for kind in (a.kind(name), b.kind(name)) if kind is not None]
    if spec is not None:
        if strict and spec.strict:
            return FactKind.MUST_MATCH
        if _may_lack(spec, a, b):
            return FactKind.BRIDGED
        if spec.settled_by is None or not (spec.settled_by in a and spec.settled_by in b):
            kinds.append(spec.kind)
    return min(kinds, key=list(FactKind).index)


def _may_lack(spec: FactSpec, a: Facts, b: Facts) -> bool:
    """One side does without, and it is the one that may."""
    value_a, value_b = a.get(spec.name), b.get(spec.name)
    if spec.may_lack is None or (value_a is None) == (value_b is None):
        return False
    without, other = (a, b) if value_a is None else (b, a)
    told = {str(Role.PREFILL), str(Role.DECODE)} - {str(spec.may_lack)}
    return without.get("role") == spec.may_lack or other.get("role") in told


def _row(name: str, spec: FactSpec | None, kind: FactKind, a: Facts, b: Facts) -> Row:
    value_a, value_b = a.get(name), b.get(name)
    if spec is None:
        text = f"upgrade kvferry: only the other side knows the fact {name!a}"
        change = Side.A if value_a is None else Side.B if value_b is None else Side.EITHER
        return Row(name, kind, value_a, value_b, change, text, text, "one side's release compares it")
    why = spec.why
    if kind is FactKind.MUST_MATCH and spec.kind is not FactKind.MUST_MATCH:
        why = "strict mode compares it; without strict mode it is bridged"
    if kind is FactKind.BRIDGED and spec.kind is FactKind.MUST_MATCH:
        why = spec.lacking
    mend_a, mend_b = _mend(spec, a, b), _mend(spec, b, a)
    change = _change(spec.change, name, a, b)
    if mend_a == mend_b == NO_SETTING:
        mend_a = mend_b = NO_SETTING_ON_EITHER
    elif NO_SETTING in (mend_a, mend_b):
        change = Side.B if mend_a == NO_SETTING else Side.A
    return Row(name, kind, value_a, value_b, change, mend_a, mend_b, why)


def _change(change: Change, name: str, a: Facts, b: Facts) -> Side:
    """Which side. Depends on nothing but the two facts, so both sides name the same one."""
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
    """The side with the older version, as far as the two can be put in order."""
    key_a, key_b = _version_key(a), _version_key(b)
    return Side.EITHER if key_a == key_b else Side.A if key_a < key_b else Side.B


def _version_key(value: FactValue) -> list[int]:
    if isinstance(value, bool | float | tuple) or value is None:
        return []
    digits = "".join(char if char.isascii() and char.isdigit() else " " for char in str(value))
    return [int(part[:9]) for part in digits.split()]


def _mend(spec: FactSpec, mine: Facts, theirs: Facts) -> str:
    """What to type on the side of `mine`, to fit what `theirs` has."""
    settings: Mapping[str, str] = spec.settings
    engine = mine.get("engine.name")
    template = settings.get(engine if isinstance(engine, str) else "", settings.get("", "set it to {value}"))
    value, model = theirs.get(spec.name), theirs.get("model.id")
    if spec.complement and value is not None:
        value = str(Role.DECODE if value == Role.PREFILL else Role.PREFILL)
    if value is None and "{value}" in template:
        text = _fill(template, "...", "...").removeprefix("kvferry serve ")
        return f"take {text} away, as the other side has none" if text.startswith("-") else text
    return _fill(template, _typed(value), _typed(model) if isinstance(model, str) else "the same model")


def _fill(template: str, value: str, model: str) -> str:
    """In one pass, so that braces in a peer's value stay what they are."""
    return re.sub(r"\{(value|model)\}", lambda found: value if found[1] == "value" else model, template)


def _typed(value: FactValue) -> str:
    """A value as it is typed in a setting. What a peer tells is never pasted into a shell unquoted."""
    if isinstance(value, tuple):
        text = ",".join(str(item) for item in value)
    else:
        text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if _HARMLESS.fullmatch(text) else show(text)
