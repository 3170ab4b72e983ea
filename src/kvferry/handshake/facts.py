"""Facts of one engine: named, effective, canonical. What peers exchange, and what is compared."""

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
    """One fact: what it is called, its effective value, and what a difference does."""

    name: str
    value: FactValue
    kind: FactKind


class _Told(msgspec.Struct, frozen=True):
    """A fact in a saved file."""

    value: FactValue
    kind: FactKind | None = msgspec.field(name="class", default=None)


def _table_kind(name: str) -> FactKind:
    """The class that our table gives a fact; one that we do not know must match, to be safe."""
    return FACTS[name].kind if name in FACTS else FactKind.MUST_MATCH


def _size(value: FactValue) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, tuple):
        return sum(len(item) if isinstance(item, str) else 8 for item in value)
    return 8


class Facts:
    """Facts in the table's order, then unknown ones by name. A fact whose value is None is not held: it is not told.

    Immutable. Raises MalformedMessage for what no correct peer tells: a fact twice, too many, too long.
    """

    __slots__ = ("_by_name",)

    def __init__(self, facts: Iterable[Fact]) -> None:
        by_name: dict[str, Fact] = {}
        for fact in facts:
            if fact.name in by_name:
                raise MalformedMessage(f"fact {fact.name!r} is told twice")
            if not 1 <= len(fact.name) <= MAX_NAME_CHARS:
                raise MalformedMessage(f"fact name {fact.name[:MAX_NAME_CHARS]!r} has {len(fact.name)} characters")
            if _size(fact.value) > MAX_VALUE_CHARS:
                raise MalformedMessage(
                    f"fact {fact.name!r} has a value of {_size(fact.value)} characters; {MAX_VALUE_CHARS} are allowed"
                )
            by_name[fact.name] = fact
            if len(by_name) > MAX_FACTS:
                raise MalformedMessage(f"more than {MAX_FACTS} facts are told")
        told = [fact for fact in by_name.values() if fact.value is not None]
        told.sort(key=lambda fact: (_ORDER.get(fact.name, len(_ORDER)), fact.name))
        self._by_name = {fact.name: fact for fact in told}

    @classmethod
    def from_engine(cls, engine: EngineDescription) -> "Facts":
        """The facts of an engine. Raises ConfigError for a setting whose effective value cannot be known."""
        values = {name: spec.read(engine) for name, spec in FACTS.items()}
        facts = []
        for name, spec in FACTS.items():
            settled = spec.settled_by is not None and values[spec.settled_by] is not None
            # The role differs by nature: each side's own table compares it, and it is in no digest.
            told = FactKind.INFORMATIVE if settled or spec.complement else spec.kind
            facts.append(Fact(name, values[name], told))
        return cls(facts).strict() if engine.strict else cls(facts)

    @classmethod
    def from_json(cls, raw: object) -> "Facts":
        """From what `to_json` gave, decoded. Raises MalformedMessage with the path of what is wrong."""
        try:
            told = msgspec.convert(raw, dict[str, _Told], strict=True)
        except msgspec.ValidationError as error:
            raise MalformedMessage(f"facts: {error}") from error
        return cls(Fact(name, fact.value, fact.kind or _table_kind(name)) for name, fact in told.items())

    def to_json(self) -> dict[str, dict[str, object]]:
        """JSON-ready: fact name to `value` and `class`."""
        return {
            fact.name: {
                "value": list(fact.value) if isinstance(fact.value, tuple) else fact.value,
                "class": str(fact.kind),
            }
            for fact in self
        }

    def get(self, name: str) -> FactValue:
        """The value; None if the fact is not told."""
        fact = self._by_name.get(name)
        return None if fact is None else fact.value

    def kind(self, name: str) -> FactKind | None:
        """The class that this side gives the fact; None if it is not told."""
        fact = self._by_name.get(name)
        return None if fact is None else fact.kind

    def strict(self) -> "Facts":
        """The same, with every factor of R2, R3, R4 and R13 told as one that must match."""
        return Facts(
            Fact(fact.name, fact.value, FactKind.MUST_MATCH) if fact.name in FACTS and FACTS[fact.name].strict else fact
            for fact in self
        )

    def replace(self, changes: Mapping[str, FactValue]) -> "Facts":
        """The same facts with other values; classes come from the table."""
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
