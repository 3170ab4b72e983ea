"""Defines a row of the table of facts. The rows are in table.py and table_speculation.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.handshake.engine_description import EngineDescription
from kvferry.handshake.values import FactValue
from kvferry.settings import Role

__all__ = ["NO_SETTING", "NO_SETTING_ON_EITHER", "Change", "FactKind", "FactSpec", "Read", "flag"]


class FactKind(StrEnum):
    """What a difference in a fact leads to."""

    MUST_MATCH = "must match"
    """The bytes mean something else: the pair is refused."""
    BRIDGED = "bridged"
    """The planner reconciles it, at a known price. It is refused only in strict mode, and only if R2 lists the fact."""
    INFORMATIVE = "informative"
    """It is shown to people, and is never a reason to refuse."""


class Change(StrEnum):
    """The side on which a difference is fixed."""

    DECODE = "decode"
    """Decode takes prefill's value; if the roles do not tell the sides apart, either side may change."""
    ABSENT = "absent"
    """The side that has no value takes the other's; if both have one, decode takes prefill's."""
    OLDER = "older"
    """The side with the lower value is upgraded."""
    EITHER = "either"
    """Either side may change."""


Read = Callable[[EngineDescription], FactValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactSpec:
    """One row of the table."""

    name: str
    kind: FactKind
    read: Read
    meaning: str
    reason: str
    """What would go wrong (must match), how it is bridged and at what price (bridged), or why it cannot matter
    (informative)."""
    settings: Mapping[str, str]
    """Maps an engine's name to the setting that gives it `{value}`; "" is the text for all other engines."""
    vllm_values: Mapping[FactValue, str] = field(default_factory=dict)
    """Maps a value to what vLLM calls it in its setting; other values are written as they are."""
    change: Change = Change.DECODE
    strict: bool = False
    """True for the facts that must match in strict mode, whatever their class (R2)."""
    rules: str = ""
    """The rules that ask for this fact, separated by spaces."""
    part_of: str | None = None
    """Another fact, of which this one is a detail. It is not compared if only one side has the other fact."""
    settled_by: str | None = None
    """Another fact that makes this one informative if it is known."""
    may_lack: Role | None = None
    """The role that may do without this must-match fact. The fact is bridged then, if the roles tell the two sides
    apart and strict mode is off."""
    lacking: str = ""
    """How it is bridged if that side lacks the fact, and at what price."""
    complement: bool = False
    """True for the role: the two values must complement each other, and the fact is left out of the digest."""


NO_SETTING = "kvferry serve has no setting for it: change it on the other side"
"""The remedy for a side that cannot be changed. The verdict then names the other side."""
NO_SETTING_ON_EITHER = "serve the same checkpoint, drafter included, with the same kvferry as the other side"
"""The remedy if neither side has a setting."""


def flag(mini: str, vllm: str, other: str = "") -> dict[str, str]:
    """Returns FactSpec.settings for the embedded engine ("" if it has none), for vLLM, and for all other engines.

    Other engines get vLLM's text by default.
    """
    return {"mini": f"kvferry serve {mini}" if mini else NO_SETTING, "vllm": vllm, "": other or vllm}
