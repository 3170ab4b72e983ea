"""The facts of one engine: named, effective, canonical values. Peers exchange and compare them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from kvferry.errors import MalformedMessage
from kvferry.handshake.engine_description import EngineDescription
from kvferry.handshake.fact import FactKind
from kvferry.handshake.table import FACTS
from kvferry.handshake.values import FactValue

__all__ = ["MAX_FACTS", "MAX_NAME_CHARS", "MAX_VALUE_CHARS", "Fact", "Facts"]

MAX_FACTS = 256
MAX_NAME_CHARS = 64
MAX_VALUE_CHARS = 4096

_ORDER = {name: index for index, name in enumerate(FACTS)}


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact: its name, its effective value, and what a difference leads to."""

    name: str
    value: FactValue
    kind: FactKind


class _SavedFact(msgspec.Struct, frozen=True):
    """A fact in a saved file."""

    value: FactValue
    kind: FactKind | None = msgspec.field(name="class", default=None)


def _table_kind(name: str) -> FactKind:
    """Returns the class that our table gives a fact. An unknown fact must match, to be safe."""
    return FACTS[name].kind if name in FACTS else FactKind.MUST_MATCH


def _size(value: FactValue) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, tuple):
        return sum(len(item) if isinstance(item, str) else 8 for item in value)
    return 8


class Facts:
    """Facts in the order of the table, followed by unknown ones by name. Immutable.

    A fact whose value is None is not reported, and is left out. Raises MalformedMessage for facts that no correct peer
    reports: the same fact twice, too many facts, or a name or value that is too long.
    """

    __slots__ = ("_by_name",)

    def __init__(self, facts: Iterable[Fact]) -> None:
        by_name: dict[str, Fact] = {}
        for fact in facts:
            if fact.name in by_name:
                raise MalformedMessage(f"fact {fact.name!r} is reported twice")
            if not 1 <= len(fact.name) <= MAX_NAME_CHARS:
                raise MalformedMessage(
                    f"fact name {fact.name[:MAX_NAME_CHARS]!r} has {len(fact.name)} characters; "
                    f"it must have 1 to {MAX_NAME_CHARS}"
                )
            if _size(fact.value) > MAX_VALUE_CHARS:
                raise MalformedMessage(
                    f"fact {fact.name!r} has a value of {_size(fact.value)} characters; at most {MAX_VALUE_CHARS} are "
                    "allowed"
                )
            by_name[fact.name] = fact
            if len(by_name) > MAX_FACTS:
                raise MalformedMessage(f"more than {MAX_FACTS} facts are reported")
        reported = [fact for fact in by_name.values() if fact.value is not None]
        reported.sort(key=lambda fact: (_ORDER.get(fact.name, len(_ORDER)), fact.name))
        self._by_name = {fact.name: fact for fact in reported}

    @classmethod
    def from_engine(cls, engine: EngineDescription) -> "Facts":
        """Returns the facts of an engine. Raises ConfigError for a setting whose effective value cannot be known."""
        values = {name: spec.read(engine) for name, spec in FACTS.items()}
        facts = []
        for name, spec in FACTS.items():
            settled = spec.settled_by is not None and values[spec.settled_by] is not None
            # Roles differ by nature: each side's own table compares them, and they are in no digest.
            kind = FactKind.INFORMATIVE if settled or spec.complement else spec.kind
            facts.append(Fact(name, values[name], kind))
        return cls(facts).strict() if engine.strict else cls(facts)

    @classmethod
    def from_json(cls, raw: object) -> "Facts":
        """Returns facts from decoded JSON that `to_json` made. Raises MalformedMessage with the path of what is
        wrong."""
        try:
            saved = msgspec.convert(raw, dict[str, _SavedFact], strict=True)
        except msgspec.ValidationError as error:
            raise MalformedMessage(f"facts: {error}") from error
        return cls(Fact(name, fact.value, fact.kind or _table_kind(name)) for name, fact in saved.items())

    def to_json(self) -> dict[str, dict[str, object]]:
        """Returns a map from the name of each fact to its `value` and `class`, ready for JSON."""
        return {
            fact.name: {
                "value": list(fact.value) if isinstance(fact.value, tuple) else fact.value,
                "class": str(fact.kind),
            }
            for fact in self
        }

    def get(self, name: str) -> FactValue:
        """Returns the value of a fact, or None if it is not reported."""
        fact = self._by_name.get(name)
        return None if fact is None else fact.value

    def kind(self, name: str) -> FactKind | None:
        """Returns the class that this side gives a fact, or None if the fact is not reported."""
        fact = self._by_name.get(name)
        return None if fact is None else fact.kind

    def strict(self) -> "Facts":
        """Returns the same facts, with every factor of R2, R3, R4 and R13 in the class *must match*."""
        return Facts(
            Fact(fact.name, fact.value, FactKind.MUST_MATCH) if fact.name in FACTS and FACTS[fact.name].strict else fact
            for fact in self
        )

    def replace(self, changes: Mapping[str, FactValue]) -> "Facts":
        """Returns the facts with some values changed. New facts get their class from the table."""
        kept = [fact for fact in self if fact.name not in changes]
        new = [Fact(name, value, self.kind(name) or _table_kind(name)) for name, value in changes.items()]
        return Facts([*kept, *new])

    def __iter__(self) -> Iterator[Fact]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Facts) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self._by_name))

    def __repr__(self) -> str:
        return f"Facts({', '.join(f'{fact.name}={fact.value!r}' for fact in self)})"
