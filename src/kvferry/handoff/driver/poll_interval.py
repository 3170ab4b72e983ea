"""How long a driver may sleep before it looks again. Each look takes the interpreter lock from the thread that runs the
model: so not often where nobody waits, and seldom where peers ring (handoff.doorbell) when they have sent something.
"""

__all__ = ["pause_s"]

_IN_FLIGHT_S = 0.0001
"""A transfer of ours is on the wire, and nothing but a look tells that it has ended."""
_EXPECTING_S = 0.0002
"""A peer has rung, and what it sent is on its way."""


def pause_s(
    now_s: float,
    *,
    in_flight: bool,
    expecting: bool,
    all_ring: bool,
    awaited: bool,
    receiving: bool,
    idle: bool,
    has_peers: bool,
    due_s: float | None,
) -> float:
    """`awaited`: somebody waits for the very next message, and something happened a moment ago. `receiving`: blocks of
    ours are filled. `idle`: no block is in our hands. `due_s`: the next deadline.
    """
    if in_flight:
        return _IN_FLIGHT_S
    if expecting:
        return _EXPECTING_S
    if all_ring:
        # A ring may be lost: then a receive of ours waits for this long, once. Deadlines can be counted on.
        longest_s = 0.005 if receiving else 0.05 if idle else 0.02
        return longest_s if due_s is None else min(longest_s, max(0.001, due_s - now_s))
    if awaited:
        return 0.0003
    if has_peers:
        # Blocks that are kept for somebody who has not come are no hurry; a receive of ours is.
        return 0.001 if receiving else 0.01 if idle else 0.002
    return 0.05
