"""Questions about prefixes, asked and answered: who may ask, how many may wait, and what an answer may be. R39"""

from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.clock import MonotonicClock
from kvferry.connector.base import HeldPrefix
from kvferry.connector.entries import OrdersBuilder
from kvferry.connector.finding import Finder, Questions
from kvferry.connector.holdings import MAX_STEP_BYTES, Holdings
from kvferry.connector.peers import Asked, Question
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.layout.blocks import BlockTable, TokenRange
from kvferry.settings import FetchSettings
from kvferry.sidechannel.late_answer import LateAnswer
from kvferry.wire.find import Find, Found, decode_found, encode_find
from kvferry.wire.prompt_digest import Prompt, pack_tokens
from tests.harness.sidechannels import listening, settings
from tests.harness.until import until

ME = Incarnation("i2")


def find(transfer: str = "t", **changes: Any) -> Find:
    fields: dict[str, Any] = {"to": ME, "engine": "p0", "incarnation": "i1", "transfer": transfer}
    return Find(**{**fields, "packed": pack_tokens(range(64)), **changes})


def accepted(engine: EngineId, incarnation: Incarnation) -> bool | None:
    return (engine, incarnation) == ("p0", "i1")


def said(answer: bytes | LateAnswer) -> Found:
    """What was answered, at once or by now."""
    sent: list[bytes] = [answer] if isinstance(answer, bytes) else []
    if isinstance(answer, LateAnswer):
        answer.then(sent.append)
    return decode_found(sent[0])


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (find(to="i1"), "it has restarted"),
        (find(engine="stranger"), "shake hands first"),
        (find(incarnation="i0"), "shake hands first"),
    ],
)
def test_only_an_accepted_engine_that_means_us_may_ask(question: Find, reason: str) -> None:
    woken: list[None] = []
    questions = Questions(FetchSettings(), lambda: woken.append(None))
    found = said(questions.ask(encode_find(question), ME, accepted))
    assert (found.num_tokens, len(questions), woken) == (0, 0, [])
    assert reason in found.reason


def test_rubbish_is_answered_and_forgotten() -> None:
    questions = Questions(FetchSettings(), lambda: None)
    for body in (b"KVQ\x01", b"KVQ\x01\xc1", encode_find(Found(transfer="t"))):
        assert said(questions.ask(body, ME, accepted)).reason.startswith("find: ")
    assert len(questions) == 0


def test_no_more_questions_of_one_engine_wait_than_the_bound() -> None:  # R39
    questions = Questions(FetchSettings(max_questions=2), lambda: None)
    answers = [questions.ask(encode_find(find(str(i))), ME, accepted) for i in range(3)]
    assert "busy: 2 questions of this engine wait" in said(answers[2]).reason
    first, second = questions.take(1 << 20, accepted)
    first.answer(Found(transfer="0", num_tokens=16))
    assert said(answers[0]).num_tokens == 16
    assert isinstance(questions.ask(encode_find(find("3")), ME, accepted), LateAnswer), "there is room again"
    questions.refuse_all("the end")
    second.answer(Found(transfer="1"))


@pytest.mark.parametrize("allowed", [True, False])
def test_a_question_waits_while_its_peer_is_being_met(allowed: bool) -> None:  # R39
    """Both sides may ask each other at once: then the peer has accepted us before we have read its answer."""
    questions = Questions(FetchSettings(), lambda: None)
    answer = questions.ask(encode_find(find()), ME, lambda engine, incarnation: None)
    assert questions.take(1 << 20, lambda engine, incarnation: None) == []
    assert len(questions) == 1
    assert len(questions.take(1 << 20, lambda engine, incarnation: allowed)) == allowed
    assert len(questions) == 0
    if not allowed:
        assert "shake hands first" in said(answer).reason


class Board:
    """A PrefixBoard with these questions."""

    def __init__(self, questions: Questions) -> None:
        self.questions = questions

    def find(self, host: str, port: int, find: Find) -> Asked:
        raise AssertionError("nothing is asked here")

    def poll_finds(self) -> None:
        """There are none."""

    def take_questions(self, max_bytes: int) -> Sequence[Question]:
        return self.questions.take(max_bytes, accepted)

    @property
    def num_questions(self) -> int:
        return len(self.questions)


class Holder:
    """Holds 48 tokens of everything, if it does not raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.seen: list[tuple[int, str, int]] = []

    def hold(self, transfer: TransferId, prompt: Prompt, *, more_than: int, share: float) -> HeldPrefix | str:
        self.seen.append((prompt.num_tokens, prompt.salt_text, more_than))
        if self.error is not None:
            raise self.error
        return HeldPrefix(48, (BlockTable(0, 0, (3, 4, 5)),)) if prompt.num_tokens > 48 else "it holds nothing"


def holdings(fetch: FetchSettings, holder: Holder | None) -> tuple[Holdings, Questions]:
    questions = Questions(fetch, lambda: None)
    made = Holdings(Board(questions), fetch)
    made.holder = holder
    return made, questions


def test_a_question_becomes_a_final_offer_of_exactly_what_is_held() -> None:
    made, questions = holdings(FetchSettings(), holder := Holder())
    answer = questions.ask(encode_find(find(salt="s", more_than=16)), ME, accepted)
    orders = OrdersBuilder()
    (entry,) = made.answer({}, orders)
    assert said(answer) == Found(transfer="t", num_tokens=48)
    assert holder.seen == [(64, "s", 16)]
    offer = orders.offer[TransferId("t")]
    assert (offer.final, offer.ready, offer.tables[0].block_ids) == (True, TokenRange(0, 48), (3, 4, 5))
    assert offer.prompt is entry.prompt
    assert entry.prompt.num_tokens == 48


@pytest.mark.parametrize(
    ("fetch", "holder", "reason"),
    [
        (FetchSettings(share=0.0), Holder(), "gives nothing of its cache"),
        (FetchSettings(), None, "gives nothing of its cache"),
        (FetchSettings(max_tokens=32), Holder(), "it holds nothing"),
        (FetchSettings(), Holder(OverflowError("injected")), "looking it up has failed"),
    ],
)
def test_what_is_not_held_is_said_with_the_reason(fetch: FetchSettings, holder: Holder | None, reason: str) -> None:
    made, questions = holdings(fetch, holder)
    answer = questions.ask(encode_find(find()), ME, accepted)
    orders = OrdersBuilder()
    assert made.answer({}, orders) == []
    assert (said(answer).num_tokens, orders.offer) == (0, {})
    assert reason in said(answer).reason


def test_a_step_answers_one_question_and_more_only_while_they_are_short() -> None:  # R39: no step waits for a flood
    made, questions = holdings(FetchSettings(), holder := Holder())
    sizes = (MAX_STEP_BYTES // 2, MAX_STEP_BYTES, 100, 100, 2 * MAX_STEP_BYTES)  # in tokens: of 4 bytes each
    for number, size in enumerate(sizes):
        questions.ask(encode_find(find(str(number), packed=pack_tokens(range(size // 4)))), ME, accepted)
    answered = []
    while made.num_questions:
        before = len(holder.seen)
        made.answer({}, OrdersBuilder())
        answered.append(len(holder.seen) - before)
    assert answered == [3, 1, 1]  # the oldest one goes first, and short ones may pass a long one


def test_one_transfer_id_is_granted_once() -> None:
    made, questions = holdings(FetchSettings(), Holder())
    answers = [questions.ask(encode_find(find(name)), ME, accepted) for name in ("t", "t", "used")]
    assert len(made.answer({TransferId("used"): None}, OrdersBuilder())) == 1
    assert [said(one).num_tokens for one in answers] == [48, 0, 0]
    assert "in use" in said(answers[1]).reason


def test_a_question_without_an_answer_or_with_a_wrong_one_finds_nothing() -> None:  # R40
    bodies = {
        "silent": None,
        "rubbish": b"\x00",
        "another": encode_find(Found(transfer="other", num_tokens=16)),
        "none": encode_find(Found.nothing("none", "it holds nothing")),
        "some": encode_find(Found(transfer="some", num_tokens=16)),
    }

    def answer(body: bytes, address: str) -> bytes | LateAnswer:
        asked = next(name for name in bodies if name.encode() in body)
        return bodies[asked] or LateAnswer()

    with listening(answer) as server:
        finder = Finder(settings(), 0.5, clock=MonotonicClock())
        asked = {name: finder.ask("127.0.0.1", server.port, find(name)) for name in bodies}
        until(lambda: all(one.found is not None for one in asked.values()), meanwhile=finder.poll)
        finder.close()
    found = {name: one.found for name, one in asked.items() if one.found is not None}
    assert {name: one.num_tokens for name, one in found.items()} == dict.fromkeys(bodies, 0) | {"some": 16}
    assert "gave no answer" in found["silent"].reason
    assert "cannot be read" in found["rubbish"].reason
    assert "another question" in found["another"].reason
    assert found["none"].reason == "it holds nothing"
