"""Decodes JSON from clients into records; errors name the field, its value and the remedy."""

import re
from enum import Enum
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from kvferry.web.api_errors import ApiError

__all__ = ["decode_body", "shown"]

_MAX_SHOWN_CHARS = 80

Body = TypeVar("Body")


def decode_body(raw: bytes | memoryview, kind: type[Body]) -> Body:
    """Decodes and checks a body. Raises ApiError (400) with the field, its value and the remedy."""
    try:
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError as error:
            raise _wrong_field(msgspec.json.decode(raw), str(error), kind) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply: send a flatter one", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(
            400, f"the body is not valid JSON: {error}. Send one JSON object, in UTF-8", code="invalid_json"
        ) from error


def shown(value: object) -> str:
    """Returns the repr of a value for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."


def _wrong_field(value: Any, complaint: str, kind: type) -> ApiError:
    what, _, path = complaint.partition(" - at `$")
    steps = re.findall(r"\.(\w+)|\[(\d+)\]", path)
    missing = re.search(r"missing required field `(\w+)`", what)
    if missing and not steps:
        return ApiError(400, f"the body has no {missing[1]!r}: send it", param=missing[1], code="missing_field")
    unknown = re.search(r"contains unknown field `(.*)`", what)
    if unknown:
        name = "".join(f"{step}." for step, _ in steps) + unknown[1]
        return ApiError(400, f"{name} is not a known field: leave it out", param=name, code="unsupported")
    if not steps:
        return ApiError(400, f"the body is {shown(value)}: send one JSON object", code="invalid_type")
    for name, index in steps:
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError):  # the path ends at `[...]`: show the nearest value
            break
    name = "".join(f".{name}" if name else f"[{index}]" for name, index in steps)[1:]
    if choices := _choices_of(kind, name):
        what, remedy = f"{shown(value)} is not one of its values", f"Send {choices}"
    else:
        what, remedy = what[:1].lower() + what[1:], "Send a value of that type"
    message = f"{name}={shown(value)}: {what}. {remedy}, or leave the field out"
    return ApiError(400, message, param=name, code="invalid_type")


def _choices_of(kind: type, name: str) -> str:
    """Returns the values that a field takes, for people, if its type is an enumeration; else nothing."""
    hint = get_type_hints(kind).get(name)
    for one in (hint, *get_args(hint)):
        if isinstance(one, type) and issubclass(one, Enum):
            return " or ".join(repr(str(choice.value)) for choice in one)
    return ""
