"""The listener and its clients over real sockets: authentication, limits, survival."""

import resource
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from kvferry.errors import ConfigError, MalformedMessage, PeerLost
from kvferry.handshake.handshaker import Handshaker
from kvferry.settings import Role
from kvferry.sidechannel.client import MAX_IN_FLIGHT
from kvferry.sidechannel.listener import SideChannelServer
from kvferry.sidechannel.shared_key import new_key
from kvferry.wire.envelope import Kind, decode_envelope
from tests.harness.handshake_examples import side
from tests.harness.sidechannels import answering, asking, collect, listening, settings, shake
from tests.harness.until import until


def echo(body: bytes, address: str) -> bytes:
    return b"echo " + body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_question_and_its_answer(host: str) -> None:
    given = settings(host=host)
    with listening(echo, given) as server, asking() as client:
        assert client.ask(server.host, server.port, b"hello") == b"echo hello"
        assert server.stats().answered == 1


def test_handshake_over_the_wire() -> None:
    p, d = Handshaker(side("p0")), Handshaker(side("d0", role=Role.DECODE))
    with listening(answering(p)) as server, asking() as client:
        assert shake(d, client, "p0", server.port) == "accepted"
    assert [new.engine for new in p.take_accepted()] == ["d0"]
    assert [new.engine for new in d.take_accepted()] == ["p0"]


def test_without_a_key_only_loopback_is_bound() -> None:
    with pytest.raises(ConfigError, match=r"refusing to listen there.*kvferry key new FILE"):
        SideChannelServer(settings(host="0.0.0.0"), echo)


def test_without_a_key_only_loopback_is_asked() -> None:
    with asking() as client:
        client.ask_nowait("10.0.0.1", 5600, b"x", 7)
        result = collect(client, 1)[7]
    assert isinstance(result, ConfigError)
    assert "refusing to connect to it" in str(result)


def test_a_port_in_use_is_reported_with_its_setting() -> None:
    with (
        listening(echo) as server,
        pytest.raises(ConfigError, match=rf"side_channel\.port={server.port} cannot be bound"),
    ):
        SideChannelServer(settings(port=server.port), echo)


def test_with_one_key_any_address_works(tmp_path: Path) -> None:
    new_key(tmp_path / "key")
    given = settings(host="0.0.0.0", key_file=str(tmp_path / "key"))
    with listening(echo, given) as server, asking(given) as client:
        assert client.ask("127.0.0.1", server.port, b"hello") == b"echo hello"


@pytest.mark.parametrize("key", ["other", "none"])
def test_a_wrong_key_never_reaches_the_handler(key: str, tmp_path: Path) -> None:
    new_key(tmp_path / "key")
    new_key(tmp_path / "other")
    calls: list[bytes] = []

    def handler(body: bytes, address: str) -> bytes:
        calls.append(body)
        return b"secret"

    theirs = settings(timeout_s=0.5, key_file=str(tmp_path / "other") if key == "other" else None)
    ours = settings(key_file=str(tmp_path / "key"))
    with listening(handler, ours) as server:
        with asking(theirs) as stranger, pytest.raises(PeerLost, match=r"does it use the same --key-file"):
            stranger.ask("127.0.0.1", server.port, b"let me in")
        with asking(ours) as friend:
            assert friend.ask("127.0.0.1", server.port, b"hello") == b"secret"
    assert calls == [b"hello"]


def test_a_client_with_only_the_public_key_is_denied(tmp_path: Path) -> None:
    key = new_key(tmp_path / "key")
    public, secret = zmq.curve_keypair()
    with (
        listening(echo, settings(key_file=str(tmp_path / "key"))) as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.linger = 0
        dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = key.public, public, secret
        dealer.connect(f"tcp://127.0.0.1:{server.port}")
        dealer.send_multipart([b"t", b"let me in"])
        until(lambda: server.stats().denied >= 1, "a denial")
        assert not dealer.poll(50)
        assert server.stats().answered == 0


def test_more_connections_than_max_peers_are_denied() -> None:
    with listening(echo, settings(max_peers=2)) as server, ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        for index in range(3):
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.linger = 0
            dealer.connect(f"tcp://127.0.0.1:{server.port}")
            dealer.send_multipart([b"t", b"hello"])
            if index < 2:
                assert dealer.recv_multipart()[1] == b"echo hello"
        until(lambda: server.stats().denied >= 1, "a denial")
        assert server.stats().answered == 2


def test_a_good_peer_is_accepted_after_strangers_have_left() -> None:
    """Silent connections fill the listener; a peer that was denied for that is accepted later."""
    with listening(echo, settings(max_peers=2)) as server, asking() as client, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        until(lambda: server.stats().connections >= 4, "strangers")
        client.ask_nowait("127.0.0.1", server.port, b"hello", 1)
        until(lambda: server.stats().denied >= 1, "a denial", meanwhile=lambda: client.wait(0.05))
        stack.close()
        assert collect(client, 1) == {1: b"echo hello"}


def test_connections_leave_half_of_the_descriptors_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (4, 4))
    with listening(echo, settings(max_peers=1000)) as server, ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        for _ in range(3):
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.linger = 0
            dealer.connect(f"tcp://127.0.0.1:{server.port}")
            dealer.send_multipart([b"t", b"hello"])
        until(lambda: server.stats().denied >= 1, "a denial")


def test_too_many_questions_are_answered_busy() -> None:
    given = settings(max_handshakes_per_s=2.0)
    with listening(echo, given) as server, asking() as client:
        for token in range(8):
            client.ask_nowait("127.0.0.1", server.port, b"x", token)
        replies = [reply for reply in collect(client, 8).values() if isinstance(reply, bytes)]
        busy = [decode_envelope(reply) for reply in replies if not reply.startswith(b"echo")]
        assert len(busy) == 4
        assert {envelope.kind for envelope in busy} == {Kind.BUSY}
        assert server.stats().limited == 4


def test_a_handler_that_raises_costs_one_answer(caplog: pytest.LogCaptureFixture) -> None:
    def broken(body: bytes, address: str) -> bytes:
        if body == b"bad":
            raise RuntimeError("our bug")
        return b"fine"

    with listening(broken) as server, asking() as client:
        assert decode_envelope(client.ask("127.0.0.1", server.port, b"bad")).kind is Kind.BUSY
        assert client.ask("127.0.0.1", server.port, b"good") == b"fine"
        assert server.stats().failed == 1
    assert "our bug" in caplog.text


def test_messages_that_are_too_long_are_cut_off() -> None:
    given = settings(max_message_bytes=4096)
    with listening(echo, given) as server, asking(settings(timeout_s=0.5)) as client, asking() as good:
        client.ask_nowait("127.0.0.1", server.port, b"x" * 5000, 1)
        assert isinstance(collect(client, 1)[1], PeerLost)
        assert good.ask("127.0.0.1", server.port, b"x" * 3000) == b"echo " + b"x" * 3000


def test_invalid_answers_are_malformed() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, asking() as client:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        client.ask_nowait("127.0.0.1", port, b"x", 5)
        identity, token, _ = router.recv_multipart()
        router.send_multipart([identity, token, b"a", b"b"])
        assert isinstance(collect(client, 1)[5], MalformedMessage)


def test_a_dead_peer_delays_no_other_peer() -> None:
    """With thirty dead peers and a living one, the living one's answer does not wait for the others' timeouts."""
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # bound, but not listening
        with listening(echo) as server, asking(settings(timeout_s=5.0)) as client:
            for token in range(30):
                client.ask_nowait("127.0.0.1", dead.getsockname()[1], b"x", token)
            client.ask_nowait("127.0.0.1", server.port, b"hello", 99)
            assert collect(client, 1, within_s=4.0) == {99: b"echo hello"}


def test_more_questions_than_sockets_wait_their_turn() -> None:
    num = MAX_IN_FLIGHT + 40
    with listening(echo, settings(max_handshakes_per_s=1e6)) as server, asking() as client:
        for token in range(num):
            client.ask_nowait("127.0.0.1", server.port, b"%d" % token, token)
        assert collect(client, num) == {token: b"echo %d" % token for token in range(num)}
        assert len(client) == 0


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 0), ("127.0.0.1", 70000), ("127.0.0.1", -1)])
def test_an_invalid_port_is_an_error_and_not_a_crash(host: str, port: int) -> None:
    with asking() as client:
        client.ask_nowait(host, port, b"x", 1)
        assert isinstance(collect(client, 1)[1], ConfigError)


@pytest.mark.parametrize("host", ["", "no such host!", "127.0.0.1:99", "x" * 300])
def test_an_invalid_host_is_an_error_and_not_a_crash(host: str, tmp_path: Path) -> None:
    new_key(tmp_path / "key")
    with asking(settings(timeout_s=0.3, key_file=str(tmp_path / "key"))) as client:
        client.ask_nowait(host, 5600, b"x", 1)
        assert isinstance(collect(client, 1)[1], PeerLost)


def test_close_is_idempotent_and_start_is_not_needed() -> None:
    before = threading.active_count()
    server = SideChannelServer(settings(), echo)
    server.close()
    server.close()
    with asking() as client:
        client.close()
    assert threading.active_count() == before
