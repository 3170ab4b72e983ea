"""What a transport received becomes complete messages; what cannot be decoded is dropped."""

import logging

import pytest

from kvferry.handoff.driver.inbox import Inbox
from kvferry.ids import PeerName
from kvferry.layout.blocks import BlockTable
from kvferry.transport.base import Received
from kvferry.wire.handoff_messages import Register, Stopped, encode_message, frames, to_wire

PEER, OTHER = PeerName("p/1/0"), PeerName("q/1/0")
LONG = Register(
    to="1",
    transfer="t",
    ranks=1,
    start=0,
    stop=1,
    tables=to_wire([BlockTable(0, 0, tuple(range(1 << 16, (1 << 16) + 40_000)))]),
    ttl_s=1.0,
)


def test_a_long_message_is_joined_from_its_fragments_per_peer() -> None:
    inbox, pieces = Inbox(), list(frames(LONG))
    assert len(pieces) > 1
    for piece in pieces[:-1]:
        assert inbox.decode(Received(PEER, piece)) is None
        assert inbox.decode(Received(OTHER, piece)) is None
    assert len(inbox) == 2
    assert inbox.decode(Received(PEER, pieces[-1])) == LONG
    inbox.forget(OTHER)
    assert inbox.decode(Received(OTHER, pieces[-1])) is None, "a peer that was disconnected begins again"


def test_what_cannot_be_decoded_is_dropped_and_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    inbox = Inbox()
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            assert inbox.decode(Received(PEER, b"no message")) is None
    assert len(caplog.records) == 10
    stopped = Stopped(to="1", transfer="t")
    assert inbox.decode(Received(PEER, encode_message(stopped))) == stopped
