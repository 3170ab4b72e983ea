"""What is known of each field of a request body: its bounds, its meaning, and whether it is done.

The classes in request_body.py say which fields there are. Each field's annotation has a `Field`, so there is one table:
msgspec reads the types from it, `check_fields` the bounds and what is not supported, and `make docs` makes the page of
request fields from it (`kvferry.cli.support.reference_pages`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args, get_type_hints

import msgspec

from kvferry.web.api_errors import ApiError
from kvferry.web.json_body import shown

__all__ = ["Done", "Field", "accepted", "check_fields", "done", "fields_of", "refused"]

INT64 = (-(2**63), 2**63 - 1)


class Done(Enum):
    """What becomes of a field."""

    YES = "done"
    NO = "refused"
    CHANGES_NOTHING = "accepted"


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """One field. Two are never equal: `Annotated` keeps one of two equal entries, and False equals 0."""

    does: Done
    meaning: str
    """What it does; of a refused field, what to do instead."""
    low: float | None = None
    high: float | None = None
    max_items: int | None = None
    """The most elements of a list or an object."""
    max_chars: int | None = None
    """The longest string, also in a list."""
    default: str = ""
    """What holds if it is left out, for people."""
    nothing: tuple[Any, ...] = (None,)
    """Values of a refused field that ask for nothing, and are accepted."""

    @property
    def range_text(self) -> str:
        """The range of a number, for people; empty if it has none."""
        if self.low is None or self.high is None:
            return ""
        return f"{_number(self.low)} to {_number(self.high)}"


def done(
    meaning: str,
    bounds: tuple[float, float] | None = None,
    *,
    default: str = "",
    max_items: int | None = None,
    max_chars: int | None = None,
) -> Field:
    """Returns the entry of a field that kvferry does."""
    low, high = bounds if bounds is not None else (None, None)
    return Field(Done.YES, meaning, low, high, max_items, max_chars, default)


def refused(remedy: str, *nothing: Any) -> Field:
    """Returns the entry of a field that would change the answer, and that kvferry does not do. `nothing`: accepted
    values besides null."""
    return Field(Done.NO, remedy, nothing=(None, *nothing))


def accepted(meaning: str) -> Field:
    """Returns the entry of a field that changes no answer."""
    return Field(Done.CHANGES_NOTHING, meaning)


def fields_of(kind: type[msgspec.Struct]) -> dict[str, tuple[Field, Any]]:
    """Returns the entry and the type of each field of a body, or of an object in one."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        entry = next((one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Field)), None)
        assert entry is not None, f"{kind.__name__}.{name} has no entry in the table"
        found[name] = (entry, get_args(hint)[0])
    return found


def check_fields(body: msgspec.Struct) -> None:
    """Raises ApiError (400) for a value out of its bounds, and for a field that is not supported."""
    for name, entry in _entries(type(body)):
        value = getattr(body, name)
        if entry.does is Done.NO:
            if not any(type(value) is type(one) and value == one for one in entry.nothing):
                raise ApiError(
                    400, f"{name}={shown(value)} is not supported: {entry.meaning}", param=name, code="unsupported"
                )
        elif value is not None:
            _check(name, value, entry)


def _check(name: str, value: Any, entry: Field) -> None:
    if entry.max_items is not None and isinstance(value, list | dict) and len(value) > entry.max_items:
        raise _out_of_range(name, f"{name} has {len(value)} entries: send at most {entry.max_items}")
    if entry.max_chars is not None and not isinstance(value, int | float):
        for text in [value] if isinstance(value, str) else value:
            if isinstance(text, str) and len(text) > entry.max_chars:
                raise _out_of_range(
                    name, f"{name} has a string of {len(text)} characters: send at most {entry.max_chars}"
                )
    if entry.low is None or entry.high is None:
        return
    for where, number in _numbers(name, value):
        if not (entry.low <= number <= entry.high and math.isfinite(number)):
            raise _out_of_range(
                name, f"{where}={shown(number)} is out of range: send {entry.range_text}, or leave it out"
            )


def _numbers(name: str, value: Any) -> Iterator[tuple[str, int | float]]:
    """Yields each number of a value, with its place."""
    if isinstance(value, int | float):
        yield name, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(f"{name}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(f"{name}[{shown(key)}]", item)


def _out_of_range(name: str, message: str) -> ApiError:
    return ApiError(400, message, param=name, code="out_of_range")


_known: dict[type[msgspec.Struct], Sequence[tuple[str, Field]]] = {}


def _entries(kind: type[msgspec.Struct]) -> Sequence[tuple[str, Field]]:
    if kind not in _known:
        _known[kind] = [(name, entry) for name, (entry, _) in fields_of(kind).items()]
    return _known[kind]


def _number(value: float) -> str:
    exact = {2**31 - 1: "2147483647", INT64[0]: "-2^63", INT64[1]: "2^63 - 1"}
    return exact.get(int(value)) or f"{value:g}"
