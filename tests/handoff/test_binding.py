"""R51: a hand-off is bound to its tokens. Both modes; prompts that differ, and peers that cannot say."""

from collections.abc import Callable, Sequence

import pytest

from kvferry.handoff.prefill.grant import Consumer
from kvferry.layout.blocks import TokenRange
from kvferry.settings import OlderPeers, TransferMode
from kvferry.wire.handoff_messages import Claim, Message, Ready, Register, Renew, Wrote
from kvferry.wire.prompt_digest import Agreement
from kvferry.wire.versions import BINDING, DOORBELL
from tests.harness.handoff_pair import Pair

PULL, PUSH = TransferMode.PULL, TransferMode.PUSH
OURS = (11, 12, 13, 14)
BOTH = pytest.mark.parametrize("mode", [PULL, PUSH])


def hand_over(pair: Pair, asked: Sequence[int] | None, *, early: bool = False, start: int = 0) -> list[Message]:
    """Offers OURS with a first token, asks for `asked`, and returns all messages. `early`: decode comes first."""
    seen: list[Message] = []

    def watch(message: Message) -> bool:
        seen.append(message)
        return True

    def want() -> None:
        pair.want("t", start, 4 if asked is None else len(asked), prompt=asked, blocks=(5, 6, 7, 8, 9, 10))
        pair.deliver(only=watch)

    if early:
        want()
        pair.offer("t", 2, final=False, prompt=OURS)
        pair.deliver(only=watch)
    pair.offer("t", 4, prompt=OURS, note=b"first")
    if not early:
        want()
    for _ in range(8):
        pair.deliver(only=watch)
        for rank in (*pair.prefill, *pair.decode):
            if rank.posts:
                pair.finish(rank)
    return seen


def moved(seen: Sequence[Message]) -> int:
    """Returns the largest token that prefill has offered, or written."""
    return max((one.stop for one in seen if isinstance(one, Ready | Wrote)), default=0)


@BOTH
@pytest.mark.parametrize("early", [False, True])
def test_the_same_prompt_is_handed_over_with_its_first_token(mode: TransferMode, early: bool) -> None:
    pair = Pair(mode)
    hand_over(pair, OURS, early=early)
    (landed,) = pair.decode[0].report.landed
    assert (landed.arrived, landed.note, landed.difference) == (TokenRange(0, 4), b"first", "")


@BOTH
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("asked", "common"),
    [
        ((11, 12, 99, 98), 2),  # same length
        ((11, 12, 13), 3),  # one token shorter
        ((11, 12), 2),
        ((11, 12, 98), 2),
        ((11, 12, 98, 97, 96), 2),
    ],
)
def test_only_the_common_prefix_is_handed_over_and_never_the_first_token(
    mode: TransferMode, early: bool, asked: tuple[int, ...], common: int
) -> None:
    pair = Pair(mode)
    seen = hand_over(pair, asked, early=early)
    (landed,) = pair.decode[0].report.landed
    assert (landed.arrived, landed.note) == (TokenRange(0, common), b"")
    assert moved(seen) == common
    assert f"differs after {common} tokens" in landed.difference
    assert "kv_transfer_params of its own prefill" in landed.difference


@BOTH
def test_a_longer_prompt_gets_all_that_prefill_has(mode: TransferMode) -> None:
    pair = Pair(mode)
    hand_over(pair, (*OURS, 15, 16))
    (landed,) = pair.decode[0].report.landed
    assert (landed.arrived, landed.note) == (TokenRange(0, 4), b"")


@BOTH
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("asked", [(91, 92, 93, 94), (91, 92), (91, 92, 93, 94, 95)])
def test_nothing_in_common_fails_with_the_remedy_and_moves_no_byte(
    mode: TransferMode, early: bool, asked: tuple[int, ...]
) -> None:
    pair = Pair(mode)
    seen = hand_over(pair, asked, early=early)
    (failed,) = pair.decode[0].report.failed
    assert moved(seen) == 0
    assert len(failed.arrived) == 0
    assert failed.reason.startswith("prefill computed another prompt, which differs at the first token. Check that ")
    assert pair.decode[0].report.released == {"t"}
    pair.step(0.5)
    assert pair.prefill[0].report.released == {"t"}  # decode has said so: prefill does not wait for its lease


@BOTH
def test_what_decode_has_already_is_all_that_they_have_in_common(mode: TransferMode) -> None:
    pair = Pair(mode)
    hand_over(pair, (11, 12, 98, 97), start=2)
    assert "differs after 2 tokens" in pair.decode[0].report.failed[0].reason


@BOTH
def test_windows_and_states_need_the_whole_range(mode: TransferMode) -> None:
    pair = Pair(mode, whole_prefix=False)
    hand_over(pair, (11, 12, 98, 97))
    (failed,) = pair.decode[0].report.failed
    assert "differs after 2 tokens" in failed.reason
    assert len(failed.arrived) == 0


@BOTH
def test_all_ranks_come_to_the_same_answer(mode: TransferMode) -> None:
    pair = Pair(mode, prefill_ranks=2, decode_ranks=3)
    hand_over(pair, (11, 12, 98, 97))
    for rank in pair.decode:
        (landed,) = rank.report.landed
        assert landed.arrived == TokenRange(0, 2)
        assert "differs after 2 tokens" in landed.difference


@BOTH
def test_with_the_comparison_off_another_prompts_kv_lands(mode: TransferMode, monkeypatch: pytest.MonkeyPatch) -> None:
    always: Callable[..., Agreement] = lambda prompt, stated: Agreement(stated.num_tokens, whole=True)  # noqa: E731
    monkeypatch.setattr("kvferry.wire.prompt_digest.Prompt.agreement", always)
    pair = Pair(mode)
    hand_over(pair, (91, 92, 93, 94))
    assert pair.decode[0].report.landed[0].arrived == TokenRange(0, 4)  # the fault that the tests above would miss


# Peers of an older version


@BOTH
def test_an_older_peer_gets_and_sends_no_new_field(mode: TransferMode) -> None:
    pair = Pair(mode, protocol=BINDING - 1)
    seen = hand_over(pair, OURS)
    assert pair.decode[0].report.landed
    assert all(one.prompt is None for one in seen if isinstance(one, Claim | Register))
    assert all(one.same_tokens == -1 and not one.same_prompt for one in seen if isinstance(one, Ready | Wrote))


@BOTH
def test_an_older_peer_must_at_least_have_the_right_number_of_tokens(mode: TransferMode) -> None:
    pair = Pair(mode, protocol=BINDING - 1)
    hand_over(pair, (11, 12, 13))
    (failed,) = pair.decode[0].report.failed
    assert "it has 4 tokens to hand over, not 3" in failed.reason
    assert len(failed.arrived) == 0


@BOTH
def test_decode_counts_what_an_older_prefill_offers(mode: TransferMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older prefill hands over whatever is asked for; decode, which knows its own prompt, must count."""
    monkeypatch.setattr(Consumer, "obstacle", lambda *args, **kwargs: "")
    pair = Pair(mode, protocol=BINDING - 1)
    pair.offer("t", 4)
    pair.want("t", 0, 4, expected=5)  # as if the parameters had named fewer tokens than our prompt has
    pair.finish_all()
    (failed,) = pair.decode[0].report.failed
    assert "it has 4 tokens to hand over, not 5" in failed.reason
    assert len(failed.arrived) == 0


@BOTH
def test_an_older_peer_is_refused_by_setting(mode: TransferMode) -> None:
    pair = Pair(mode, protocol=BINDING - 1, older_peers=OlderPeers.REFUSE)
    seen = hand_over(pair, OURS)
    (failed,) = pair.decode[0].report.failed
    assert moved(seen) == 0
    assert "speaks protocol version 3 and cannot say" in failed.reason
    assert "--older-peers count" in failed.reason


def test_the_version_of_doorbells_comes_before_that_of_binding() -> None:
    assert DOORBELL < BINDING
    assert Renew(to="i", seq=0, from_decode=True, transfers=()).bell_port == 0
