"""A driver gives up a connection that hangs and comes back; the peer, which noticed nothing, must be heard again."""

import time
from collections.abc import Callable

import pytest

from kvferry.ids import PeerName
from kvferry.testing.ends import LocalEnd
from kvferry.transport.base import Transport
from kvferry.transport.memory import MemoryHub, MemoryTransport

NEAR, FAR = PeerName("near/i1/0"), PeerName("far/i1/0")


def _nixl(name: PeerName) -> Transport:
    from kvferry.transport.nixl.nixl import NixlTransport

    return NixlTransport(name)


def _next_message(end: LocalEnd) -> bytes:
    until_s = time.monotonic() + 10
    while True:
        for received in end.transport.poll().messages:
            return received.body
        assert time.monotonic() < until_s, "no message came"


@pytest.mark.parametrize("kind", ["memory", pytest.param("nixl", marks=pytest.mark.process)])
def test_a_peer_is_heard_after_one_side_came_back(kind: str) -> None:
    hub = MemoryHub()
    make: Callable[[PeerName], Transport] = _nixl if kind == "nixl" else lambda name: MemoryTransport(name, hub=hub)
    near, far = LocalEnd(make(NEAR), NEAR, (4096,)), LocalEnd(make(FAR), FAR, (4096,))
    try:
        near.transport.connect(FAR, far.transport.metadata(), far.regions)
        far.transport.connect(NEAR, near.transport.metadata(), near.regions)
        for body in (b"one", b"two"):
            near.transport.send(FAR, body)
            assert _next_message(far) == body
            far.transport.send(NEAR, body)
            assert _next_message(near) == body
        near.transport.disconnect(FAR)
        near.transport.connect(FAR, far.transport.metadata(), far.regions)
        near.transport.send(FAR, b"back")
        assert _next_message(far) == b"back"
        far.transport.send(NEAR, b"heard")
        assert _next_message(near) == b"heard"
    finally:
        near.close()
        far.close()
