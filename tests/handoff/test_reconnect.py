"""A driver gives up a connection that hangs, and comes back: messages of the peer, unaware of that, still arrive."""

import time
from collections.abc import Callable

import pytest

from kvferry.ids import PeerName
from kvferry.testing.ends import LocalEnd
from kvferry.transport.base import Transport
from kvferry.transport.memory import MemoryHub, MemoryTransport

LOCAL, REMOTE = PeerName("near/i1/0"), PeerName("far/i1/0")


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
def test_messages_of_a_peer_arrive_after_one_side_came_back(kind: str) -> None:
    hub = MemoryHub()
    make: Callable[[PeerName], Transport] = _nixl if kind == "nixl" else lambda name: MemoryTransport(name, hub=hub)
    local, remote = LocalEnd(make(LOCAL), LOCAL, (4096,)), LocalEnd(make(REMOTE), REMOTE, (4096,))
    try:
        local.transport.connect(REMOTE, remote.transport.metadata(), remote.regions)
        remote.transport.connect(LOCAL, local.transport.metadata(), local.regions)
        for body in (b"one", b"two"):
            local.transport.send(REMOTE, body)
            assert _next_message(remote) == body
            remote.transport.send(LOCAL, body)
            assert _next_message(local) == body
        local.transport.disconnect(REMOTE)
        local.transport.connect(REMOTE, remote.transport.metadata(), remote.regions)
        local.transport.send(REMOTE, b"back")
        assert _next_message(remote) == b"back"
        remote.transport.send(LOCAL, b"received")
        assert _next_message(local) == b"received"
    finally:
        local.close()
        remote.close()
