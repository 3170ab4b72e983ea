"""What a row of the table of facts says. The rows are in table.py and table_speculation.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvferry.handshake.engine_description import EngineDescription
from kvferry.handshake.values import FactValue
from kvferry.settings import Role

__all__ = ["NO_SETTING", "NO_SETTING_ON_EITHER", "Change", "FactKind", "FactSpec", "Read", "flag"]


class FactKind(StrEnum):
    """What a difference in a fact does."""

    MUST_MATCH = "must match"
    """The bytes mean something else: the pair is refused."""
    BRIDGED = "bridged"
    """The planner reconciles it, at a price that is named. Refused in strict mode only, if R2 lists it."""
    INFORMATIVE = "informative"
    """Shown, and never more."""


class Change(StrEnum):
    """Which side a difference is mended on."""

    DECODE = "decode"
    """Decode takes prefill's value; either side where the roles do not tell."""
    ABSENT = "absent"
    """The side that has nothing takes the other's value; where both have one, decode does."""
    OLDER = "older"
    """The side with the lower value is upgraded."""
    EITHER = "either"


Read = Callable[[EngineDescription], FactValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactSpec:
    """One row. `settings` maps an engine's name to the setting that gives `{value}`; "" is the text for any engine."""

    name: str
    kind: FactKind
    read: Read
    meaning: str
    why: str
    """Must match: what would go wrong. Bridged: how it is bridged, and the price. Informative: why it cannot matter."""
    settings: Mapping[str, str]
    change: Change = Change.DECODE
    strict: bool = False
    """One of R2's factors: in strict mode it must match, whatever its class."""
    rules: str = ""
    part_of: str | None = None
    """Not compared where that fact is there on one side only: one row then says it all."""
    settled_by: str | None = None
    """Informative where that fact is known."""
    may_lack: Role | None = None
    """A must-match fact that the side of this role may do without, in a pair whose roles tell the two apart: bridged
    then, but not in strict mode."""
    lacking: str = ""
    """How that is bridged, and its price."""
    complement: bool = False
    """The two values must complete each other, and are left out of the digest: the role."""


NO_SETTING = "kvferry serve has no setting for it: change it on the other side"
NO_SETTING_ON_EITHER = "serve the same checkpoint, drafter included, with the same kvferry as the other side"
"""What a side is told that cannot be changed; the verdict then names the other side."""


def flag(mini: str, vllm: str, other: str = "") -> dict[str, str]:
    """Settings for the embedded engine ("": it has none), for vLLM, and for any other (by default vLLM's words)."""
    return {"mini": f"kvferry serve {mini}" if mini else NO_SETTING, "vllm": vllm, "": other or vllm}
