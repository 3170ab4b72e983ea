"""Turns what a transport received into hand-off messages: joins fragments, and drops what cannot be decoded."""

import logging

from kvferry.errors import MalformedMessage
from kvferry.ids import PeerName
from kvferry.transport.base import Received
from kvferry.wire.handoff_messages import Fragment, Message, Reassembly, decode_message

__all__ = ["Inbox"]

logger = logging.getLogger(__name__)

_MAX_WARNINGS = 10
"""Malformed messages after this many are logged at DEBUG: a peer must not fill the log."""


class Inbox:
    """One per driver. It keeps at most one unfinished message per peer."""

    def __init__(self) -> None:
        self._unfinished: dict[PeerName, Reassembly] = {}
        self._num_malformed = 0

    def __len__(self) -> int:
        return len(self._unfinished)

    def decode(self, received: Received) -> Message | None:
        """Returns the message, or None for a fragment that is not the last one and for anything malformed."""
        try:
            message = decode_message(received.body)
            if isinstance(message, Fragment):
                return self._unfinished.setdefault(received.peer, Reassembly()).add(message)
        except MalformedMessage as error:
            self._num_malformed += 1
            level = logging.WARNING if self._num_malformed <= _MAX_WARNINGS else logging.DEBUG
            logger.log(level, "message ignored peer=%s cause=%s", received.peer, error)
            return None
        return message

    def forget(self, peer: PeerName) -> None:
        """The peer is disconnected: nothing of it is kept."""
        self._unfinished.pop(peer, None)
