"""Listeners and clients of the side channel on loopback."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.errors import FerryError
from kvferry.handshake.handshaker import Handshaker
from kvferry.handshake.peer_table import PeerState
from kvferry.settings import SideChannelSettings
from kvferry.sidechannel.client import SideChannelClient
from kvferry.sidechannel.listener import OnEnvelope, SideChannelServer
from tests.harness.until import until


def settings(**changes: object) -> SideChannelSettings:
    """Returns settings with short times."""
    return SideChannelSettings(**{"timeout_s": 10.0, **changes})  # type: ignore[arg-type]  # names are checked by it


@contextmanager
def listening(on_envelope: OnEnvelope, given: SideChannelSettings | None = None) -> Iterator[SideChannelServer]:
    """Yields a listener that is started and, at the end, closed."""
    server = SideChannelServer(given or settings(), on_envelope)
    server.start()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def asking(given: SideChannelSettings | None = None) -> Iterator[SideChannelClient]:
    """Yields a client that is closed at the end."""
    client = SideChannelClient(given or settings())
    try:
        yield client
    finally:
        client.close()


def answering(handshaker: Handshaker) -> OnEnvelope:
    """The callbacks of a listener."""
    return lambda body, address: handshaker.answer(body, address, time.monotonic())


def collect(client: SideChannelClient, num: int, within_s: float = 20.0) -> dict[int, bytes | FerryError]:
    """Returns the results of `num` questions, by token."""
    results: dict[int, bytes | FerryError] = {}

    def done() -> bool:
        results.update(client.poll())
        return len(results) >= num

    until(done, f"{num} answers", within_s=within_s, meanwhile=lambda: client.wait(0.05))
    return results


def shake(handshaker: Handshaker, client: SideChannelClient, peer: str, port: int, within_s: float = 20.0) -> PeerState:
    """Runs a handshake over real sockets to its end, and returns the peer's state after it."""

    def done() -> bool:
        for asked in handshaker.take_asks():
            client.ask_nowait(asked.host, asked.port, asked.body, asked.token)
        for token, reply in client.poll():
            handshaker.replied(token, reply, time.monotonic())
        return handshaker.peers.get(peer).state is not PeerState.ASKING  # type: ignore[arg-type]

    handshaker.want(peer, None, "127.0.0.1", port, time.monotonic())  # type: ignore[arg-type]
    until(done, f"a verdict on {peer}", within_s=within_s, meanwhile=lambda: client.wait(0.05))
    return handshaker.peers.get(peer).state  # type: ignore[arg-type]


def num_descriptors() -> int:
    """Returns the number of open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def num_threads() -> int:
    """Returns the number of threads of this process, including those of C libraries."""
    return len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
