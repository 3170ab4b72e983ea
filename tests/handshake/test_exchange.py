"""From bytes to bytes: order, negotiation, refusals. R1, R8, R10, R11."""

import msgspec
import pytest

from kvferry.errors import IncompatiblePeer, MalformedMessage
from kvferry.handshake.exchange import Accepted, AskAgain, LocalSide, Refused, ask, busy, judge_ask, judge_reply, refuse
from kvferry.handshake.handshaker import Handshaker
from kvferry.ids import EngineId
from kvferry.settings import Role
from kvferry.wire.envelope import Envelope, Kind, decode_envelope, encode_envelope
from kvferry.wire.hello import Hello
from kvferry.wire.versions import PROTOCOL_MAX, ProtocolRange
from tests.harness.handshake_examples import side


def meet(asker: LocalSide, answerer: LocalSide) -> tuple[object, object, int]:
    """Returns the outcomes on both sides, and how many questions it took."""
    protocol = asker.protocols.newest
    for num_questions in (1, 2, 3):
        reply, theirs = judge_ask(answerer, decode_envelope(ask(asker, protocol)))
        ours = judge_reply(asker, reply, asked_protocol=protocol)
        if not isinstance(ours, AskAgain):
            return ours, theirs, num_questions
        protocol = ours.protocol
    raise AssertionError("they never agree")


def test_a_pair_that_fits_learns_each_others_payload() -> None:
    p, d = side("p0"), side("d0", role=Role.DECODE)
    ours, theirs, num_questions = meet(d, p)
    assert isinstance(ours, Accepted)
    assert isinstance(theirs, Accepted)
    assert ours.hello == p.hello
    assert theirs.hello == d.hello
    assert (ours.protocol, num_questions) == (PROTOCOL_MAX, 1)


@pytest.mark.parametrize(("old", "new"), [("d0", "p0"), ("p0", "d0")])
def test_an_old_and_a_new_release_pair_in_the_old_protocol(old: str, new: str) -> None:  # R11
    ranges = {old: ProtocolRange(1, 1), new: ProtocolRange()}
    p, d = side("p0", protocols=ranges["p0"]), side("d0", role=Role.DECODE, protocols=ranges["d0"])
    ours, theirs, num_questions = meet(d, p)
    assert isinstance(ours, Accepted)
    assert isinstance(theirs, Accepted)
    assert ours.protocol == theirs.protocol == 1
    assert ours.hello.capabilities == theirs.hello.capabilities == ()  # version 1 has no field for it
    assert num_questions == (1 if old == "d0" else 2)


def test_no_common_version_is_a_clear_refusal() -> None:  # R8 R11
    p, d = side("p0", protocols=ProtocolRange(2)), side("d0", role=Role.DECODE, protocols=ProtocolRange(1, 1))
    ours, theirs, _ = meet(d, p)
    assert isinstance(ours, Refused)
    assert isinstance(theirs, Refused)
    for text in (ours.reason, theirs.reason):
        assert "there is no common version. Upgrade kvferry on the older side" in text


def test_a_far_newer_peer_is_refused_before_its_payload_is_read() -> None:  # R8
    asked = decode_envelope(ask(side("d0", role=Role.DECODE)))
    future = msgspec.structs.replace(asked, protocol_min=7, protocol_max=9, protocol=9, payload=b"\xffunreadable")
    reply, outcome = judge_ask(side("p0"), future)
    assert isinstance(outcome, Refused)
    assert f"'p0' speaks protocol versions 1 to {PROTOCOL_MAX}, and 'd0' speaks 7 to 9" in outcome.reason
    assert decode_envelope(reply).kind is Kind.REFUSE


def test_both_sides_give_the_same_verdict_and_the_reason_names_everything() -> None:  # R10
    p, d = side("p0", kv_dtype="fp8", speculation=None), side("d0", role=Role.DECODE, speculation=None, head_size=64)
    ours, theirs, _ = meet(d, p)
    assert isinstance(ours, Refused)
    assert isinstance(theirs, Refused)
    assert ours.verdict is not None
    assert theirs.verdict is not None
    assert ours.verdict == theirs.verdict.mirrored()
    for text in (ours.reason, theirs.reason):
        for word in ("'p0'", "'d0'", "kv.dtype", "fp8_e4m3", "bfloat16", "model.head_size", "128", "64", "--kv-dtype"):
            assert word in text


def test_payload_and_layout_are_not_read_until_the_facts_are_accepted() -> None:  # R1 R8
    touched: list[str] = []

    def fit(peer: Hello) -> None:
        touched.append(peer.engine)

    asked = decode_envelope(ask(side("d0", role=Role.DECODE, kv_dtype="fp8")))
    hostile = msgspec.structs.replace(asked, payload=b"\x00never decoded")
    _, outcome = judge_ask(side("p0", fit=fit), hostile)
    assert isinstance(outcome, Refused)
    assert "kv.dtype" in outcome.reason
    assert touched == []
    judge_ask(side("p0", fit=fit), decode_envelope(ask(side("d0", role=Role.DECODE))))
    assert touched == ["d0"]


@pytest.mark.parametrize("error", [IncompatiblePeer("layer 'x' is missing"), MalformedMessage("overlaps")])
def test_layouts_that_do_not_fit_are_refused_with_their_reason(error: Exception) -> None:  # R19
    def fit(peer: Hello) -> None:
        raise error

    reply, outcome = judge_ask(side("p0", fit=fit), decode_envelope(ask(side("d0", role=Role.DECODE))))
    assert isinstance(outcome, Refused)
    assert str(error) in outcome.reason
    judged = judge_reply(side("d0", role=Role.DECODE), reply, asked_protocol=PROTOCOL_MAX)
    assert isinstance(judged, Refused)
    assert str(error) in judged.reason


def changed(**changes: object) -> Envelope:
    return msgspec.structs.replace(decode_envelope(ask(side("d0", role=Role.DECODE))), **changes)


@pytest.mark.parametrize(
    ("envelope", "words"),
    [
        (changed(digest=b"\x00" * 32), "a digest that is not the digest of its own facts"),
        (changed(payload=b"\xc1"), f"handshake payload, version {PROTOCOL_MAX}"),
        (changed(engine="somebody"), "the payload is from 'd0'"),
        (changed(incarnation="i9"), "the payload is from 'd0'"),
        (changed(kind=Kind.ACCEPT), "expected 'ask'"),
        (changed(facts=changed().facts * 2), "is reported twice"),
        (changed(facts=()), "a digest that is not"),
    ],
)
def test_contradictory_payloads_are_refused(envelope: Envelope, words: str) -> None:  # R20
    reply, outcome = judge_ask(side("p0"), envelope)
    assert isinstance(outcome, Refused)
    assert words in outcome.reason
    assert decode_envelope(reply).kind is Kind.REFUSE


def test_different_transports_are_refused() -> None:
    p = side("p0")
    ranks = tuple(msgspec.structs.replace(rank, transport="mooncake") for rank in p.hello.ranks)
    other = LocalSide(facts=p.facts, hello=msgspec.structs.replace(p.hello, ranks=ranks), fit=p.fit)
    _, theirs, _ = meet(side("d0", role=Role.DECODE), other)
    assert isinstance(theirs, Refused)
    assert "set the same --transport" in theirs.reason


@pytest.mark.parametrize("kind", [Kind.ASK, Kind.AGAIN])
def test_replies_out_of_place_are_refused(kind: Kind) -> None:
    body = encode_envelope(msgspec.structs.replace(decode_envelope(ask(side("p0"))), kind=kind))
    assert isinstance(judge_reply(side("d0", role=Role.DECODE), body, asked_protocol=PROTOCOL_MAX), Refused)


def test_busy_is_temporary_and_garbage_is_not() -> None:
    d = side("d0", role=Role.DECODE)
    judged = judge_reply(d, busy("p0", "-", "later"), asked_protocol=PROTOCOL_MAX)
    assert isinstance(judged, Refused)
    assert judged.temporary
    garbage = judge_reply(d, b"HTTP/1.1 400", asked_protocol=PROTOCOL_MAX)
    assert isinstance(garbage, Refused)
    assert garbage.engine is None


class Pair:
    """Two handshakers, connected by function calls."""

    def __init__(self, p: LocalSide, d: LocalSide) -> None:
        self.p, self.d = Handshaker(p), Handshaker(d)
        self.num_asked = 0

    def step(self, now_s: float) -> None:
        for asked in self.d.take_asks():
            self.num_asked += 1
            self.d.replied(asked.token, self.p.answer(asked.body, "10.0.0.2:40000", now_s), now_s)

    def want(self, now_s: float, incarnation: str | None = None) -> str:
        self.d.want(self.p.local.engine, incarnation, "10.0.0.1", 5600, now_s)  # type: ignore[arg-type]
        for _ in range(3):
            self.step(now_s)
        return self.d.want(self.p.local.engine, incarnation, "10.0.0.1", 5600, now_s).state  # type: ignore[arg-type]


def test_handshakers_accept_each_other_once() -> None:
    pair = Pair(side("p0"), side("d0", role=Role.DECODE))
    for now_s in range(5):
        assert pair.want(float(now_s)) == "accepted"
    assert pair.num_asked == 1
    assert [new.engine for new in pair.d.take_accepted()] == ["p0"]
    assert [new.engine for new in pair.p.take_accepted()] == ["d0"]
    assert pair.p.take_accepted() == []
    assert pair.p.take_gone() == []
    assert pair.p.peers.get(EngineId("d0")).address == "127.0.0.1:7000"  # where it listens, not where it called from


def test_a_refused_peer_costs_nothing_per_request() -> None:
    pair = Pair(side("p0"), side("d0", role=Role.DECODE, kv_dtype="fp8"))
    for request in range(1000):
        assert pair.want(request / 1000) == "refused"
    assert pair.num_asked == 1
    assert pair.d.take_accepted() == pair.p.take_accepted() == []
    assert "kv.dtype" in pair.d.peers.get(pair.p.local.engine).reason


def test_a_repaired_prefill_pairs_without_a_restart_of_decode() -> None:
    pair = Pair(side("p0", kv_dtype="fp8"), side("d0", role=Role.DECODE))
    assert pair.want(0.0, "i1") == "refused"
    pair.p = Handshaker(side("p0", "i2"))
    assert pair.want(1.0, "i2") == "accepted"


def test_a_repaired_decode_pairs_without_a_restart_of_prefill() -> None:
    pair = Pair(side("p0"), side("d0", role=Role.DECODE, kv_dtype="fp8"))
    assert pair.want(0.0) == "refused"
    pair.d = Handshaker(side("d0", "i2", role=Role.DECODE))
    assert pair.want(0.5) == "accepted"
    assert [new.incarnation for new in pair.p.take_accepted()] == ["i2"]


def test_a_restart_replaces_the_old_incarnation() -> None:  # I6
    pair = Pair(side("p0"), side("d0", role=Role.DECODE))
    pair.want(0.0)
    pair.d.take_accepted()
    pair.p = Handshaker(side("p0", "i2"))
    assert pair.want(1.0, "i2") == "accepted"
    assert [(gone.engine, gone.incarnation) for gone in pair.d.take_gone()] == [("p0", "i1")]
    assert [new.incarnation for new in pair.d.take_accepted()] == ["i2"]


def test_the_second_engine_with_one_id_is_refused() -> None:
    pair = Pair(side("p0"), side("d0", "i1", role=Role.DECODE))
    pair.want(0.0)
    second = Pair(side("p0"), side("d0", "i2", role=Role.DECODE))
    second.p = pair.p
    assert second.want(1.0) == "accepted"  # it may be a restart
    pair.d = Handshaker(side("d0", "i1", role=Role.DECODE))
    assert pair.want(2.0) == "refused"  # it was not one: the first engine still answers
    assert "two engines have the id 'd0'" in pair.d.peers.get(pair.p.local.engine).reason


def test_an_address_that_answers_as_another_engine_is_refused() -> None:
    d = Handshaker(side("d0", role=Role.DECODE))
    d.want("p1", None, "10.0.0.1", 5600, 0.0)  # type: ignore[arg-type]
    for asked in d.take_asks():
        d.replied(asked.token, Handshaker(side("p0")).answer(asked.body, "x", 0.0), 0.0)
    peer = d.peers.get("p1")  # type: ignore[arg-type]
    assert peer.state == "refused"
    assert peer.reason.startswith("10.0.0.1:5600 answers as 'p0' and not as 'p1'")
    assert d.take_accepted() == []


def test_no_answer_is_lost_and_asked_again() -> None:
    d = Handshaker(side("d0", role=Role.DECODE))
    d.want("p1", None, "10.0.0.1", 5600, 0.0)  # type: ignore[arg-type]
    (asked,) = d.take_asks()
    d.replied(asked.token, MalformedMessage("no answer"), 5.0)
    assert d.want("p1", None, "10.0.0.1", 5600, 5.1).state == "lost"  # type: ignore[arg-type]
    assert d.take_asks() == []
    assert d.want("p1", None, "10.0.0.1", 5600, 6.0).state == "asking"  # type: ignore[arg-type]
    assert len(d.take_asks()) == 1
    d.replied(999, b"unknown token", 6.0)
    d.close()


def test_the_handshaker_answers_garbage_and_refusals_alike() -> None:
    handshaker = Handshaker(side("p0"))
    for body in (b"", b"garbage", ask(side("p0", "i9")), refuse(side("d0"), "no")):
        assert decode_envelope(handshaker.answer(body, "x", 0.0)).kind is Kind.REFUSE
    assert handshaker.take_accepted() == []
