"""How long a driver may sleep before it looks again. Each look takes the interpreter lock from the thread that runs the
model: so few looks while nothing waits, and very few while peers wake us when they have sent something.
"""

__all__ = ["longest_wait_s", "look_every_s"]

_IN_FLIGHT_S = 0.0001
"""A part of ours is being moved, and only a look shows that it has ended."""


def longest_wait_s(now_s: float, *, in_flight: bool, receiving: bool, idle: bool, due_s: float | None) -> float:
    """Returns the longest sleep while every peer wakes us.

    `in_flight`: a part is being moved. `receiving`: blocks of ours are being filled. `idle`: no block is in
    the connector's hands. `due_s`: the next deadline.
    """
    if in_flight:
        return _IN_FLIGHT_S
    # A wake-up may be lost: then a receive of ours waits for this long, once. Deadlines can be counted on.
    longest_s = 0.005 if receiving else 0.05 if idle else 0.02
    return longest_s if due_s is None else min(longest_s, max(0.001, due_s - now_s))


def look_every_s(*, reply_expected: bool, receiving: bool, idle: bool, has_peers: bool) -> float:
    """Returns the longest sleep while some peer does not wake us.

    `reply_expected`: the next message matters at once, and something happened a moment ago.
    """
    if reply_expected:
        return 0.0003
    if has_peers:
        # Blocks that are kept for a peer that has not come are no hurry; a receive of ours is.
        return 0.001 if receiving else 0.01 if idle else 0.002
    return 0.05
