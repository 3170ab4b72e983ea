"""Compares every prefill engine of a fleet with every decode engine. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.handshake.facts import Facts
from kvferry.handshake.verdict import Verdict, verdict
from kvferry.settings import Role

__all__ = ["Cell", "Member", "fleet_matrix", "shared_ids"]


@dataclass(frozen=True, slots=True)
class Member:
    """One engine of the fleet. `name` is what a person calls it: its URL or its file."""

    name: str
    engine: str
    incarnation: str
    role: Role
    facts: Facts


@dataclass(frozen=True, slots=True)
class Cell:
    """One pair of engines. In its verdict, a is prefill and b is decode."""

    prefill: Member
    decode: Member
    verdict: Verdict


def fleet_matrix(members: Sequence[Member], *, strict: bool = False) -> tuple[Cell, ...]:
    """Returns each pair of a prefill (or both) engine and a decode (or both) engine, row by row.

    An engine is not paired with itself.
    """
    prefills = [member for member in members if member.role is not Role.DECODE]
    decodes = [member for member in members if member.role is not Role.PREFILL]
    return tuple(Cell(p, d, verdict(p.facts, d.facts, strict=strict)) for p in prefills for d in decodes if p is not d)


def shared_ids(members: Sequence[Member]) -> tuple[str, ...]:
    """Returns one sentence per engine id that several engines use; each would replace the other."""
    by_id: dict[str, dict[str, str]] = {}
    for member in members:
        by_id.setdefault(member.engine, {}).setdefault(member.incarnation, member.name)
    return tuple(
        f"engine id {engine!r} is used by {' and '.join(names.values())}: give each its own --engine-id"
        for engine, names in by_id.items()
        if len(names) > 1
    )
