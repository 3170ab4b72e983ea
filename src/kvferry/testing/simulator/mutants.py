"""The protocol with one fault each. Every fault was seen in the field, and the simulator must find all of them.

A mutant patches one RankProtocol that was just created; the product code knows nothing of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

from kvferry.handoff.actions import Action, Post, Send
from kvferry.handoff.orders import Offer
from kvferry.handoff.rank_protocol import RankProtocol
from kvferry.handoff.transitions import GrantState
from kvferry.ids import PeerName
from kvferry.wire.handoff_messages import Message, readdressed
from kvferry.wire.prompt_digest import Agreement, Prompt, StatedPrompt

__all__ = [
    "MUTANTS",
    "Mutant",
    "abort_releases_at_once",
    "binding_not_checked",
    "completion_overwrites",
    "confirm_before_write",
    "failure_not_reported",
    "first_failed_rank_frees",
    "first_token_not_bound",
    "free_while_writing",
    "old_incarnation",
    "reported_before_survivors",
    "scan_stops_at_live",
    "stale_registration",
    "wrong_heartbeat_id",
]

Mutant = Callable[[RankProtocol], None]


def _patch(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replaces a method of one object; the function gets the original as its first argument."""
    original = getattr(owner, name)

    def patched(_self: object, *args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, MethodType(patched, owner))


def free_while_writing(core: RankProtocol) -> None:
    """Prefill frees blocks when the lease ends or is revoked, although a write is in flight."""

    def advance(original: Callable[..., None], grant: Any, now_s: float) -> None:
        kept = {rank: consumer.in_flight for rank, consumer in grant.consumers.items()}
        for consumer in grant.consumers.values():
            consumer.in_flight = {}
        original(grant, now_s)
        for rank, in_flight in kept.items():
            grant.consumers[rank].in_flight = in_flight

    def completed(original: Callable[..., bool], post: Any, *args: Any, **kwargs: Any) -> bool:
        key = core.prefill._posts.get(post)
        if key is not None and key[0] not in core.prefill._grants:
            del core.prefill._posts[post]
            return True
        return original(post, *args, **kwargs)

    _patch(core.prefill, "_advance", advance)
    _patch(core.prefill, "completed", completed)


def first_failed_rank_frees(core: RankProtocol) -> None:
    """Decode frees the blocks when the first prefill rank has failed, while others may still write or be read."""
    decode = core.decode

    def advance(original: Callable[..., float], receive: Any, now_s: float) -> float:
        if any(source.finished for source in receive.sources.values()):
            for source in receive.sources.values():
                source.in_flight.clear()
                source.state = type(source.state).QUIET
        return original(receive, now_s)

    def completed(original: Callable[..., bool], post: Any, *args: Any, **kwargs: Any) -> bool:
        key = decode._outgoing._reads.get(post)
        if key is not None and post not in key[1].in_flight:
            del decode._outgoing._reads[post]
            return True
        return original(post, *args, **kwargs)

    _patch(decode._wind_down, "advance", advance)
    _patch(decode, "completed", completed)


def reported_before_survivors(core: RankProtocol) -> None:
    """A failure is reported at once, while survivors still move bytes (R26)."""

    def fail(original: Callable[..., None], receive: Any, reason: str, now_s: float) -> None:
        original(receive, reason, now_s)
        receive.report_s = min(receive.report_s, now_s)

    _patch(core.decode._wind_down, "fail", fail)


def completion_overwrites(core: RankProtocol) -> None:
    """Completions are stored per transfer, so one replaces another, and the first success completes all of them."""
    decode = core.decode

    def completed(original: Callable[..., bool], post: Any, error: str | None, *args: Any, **kwargs: Any) -> bool:
        key = decode._outgoing._reads.get(post)
        if key is None:
            return original(post, error, *args, **kwargs)
        if post not in key[1].in_flight:
            del decode._outgoing._reads[post]
            return True
        if error is None:
            key[1].in_flight = {post: key[1].in_flight[post]}
        return original(post, error, *args, **kwargs)

    _patch(decode, "completed", completed)


def scan_stops_at_live(core: RankProtocol) -> None:
    """The scan for expired grants stops at the first live one, and never sees those after it."""
    prefill = core.prefill

    def tick(original: Callable[..., None], now_s: float) -> None:
        due = prefill._timers.pop_due(now_s)
        for transfer in due:
            grant = prefill._grants.get(transfer)
            if grant is None:
                continue
            prefill._advance(grant, now_s)
            if transfer in prefill._grants:
                break
        original(now_s)

    _patch(prefill, "tick", tick)


def wrong_heartbeat_id(core: RankProtocol) -> None:
    """An acknowledgement counts for the latest heartbeat and not for the one that it answers."""
    for beats in (core.prefill._heartbeats, core.decode._heartbeats):

        def match(_original: Callable[..., Any], peer: PeerName, seq: int, beats: Any = beats) -> Any:
            beat = beats._beats.get(peer)
            if beat is None or not beat.unacked:
                return None
            latest = max(beat.unacked)
            found = beat.unacked.pop(seq, None)
            return None if found is None else (beat.unacked.get(latest, found)[0], found[1])

        _patch(beats, "_match", match)


def failure_not_reported(core: RankProtocol) -> None:
    """A side that gives up does not report it to its peer."""

    def take(original: Callable[..., list[Action]]) -> list[Action]:
        mute = ("Fail", "Drop", "Revoke")
        return [a for a in original() if not (isinstance(a, Send) and type(a.message).__name__ in mute)]

    _patch(core, "take_actions", take)


def stale_registration(core: RankProtocol) -> None:
    """Registrations are matched by request id, so that of an earlier dispatch is used for the next one."""
    prefill = core.prefill

    def offer(original: Callable[..., None], order: Any, now_s: float) -> None:
        request = order.transfer.split("#")[0]
        for transfer, grant in list(prefill._grants.items()):
            same = transfer.split("#")[0] == request and transfer != order.transfer
            if same and grant.state is GrantState.AWAITED and order.transfer not in prefill._grants:
                prefill._grants[order.transfer] = prefill._grants.pop(transfer)
                grant.transfer = order.transfer
                for consumer in grant.consumers.values():
                    if consumer.push:
                        prefill._heartbeats.remove(consumer.peer, transfer)
                        prefill._heartbeats.add(consumer.peer, order.transfer, now_s)
        original(order, now_s)

    _patch(prefill, "offer", offer)


def old_incarnation(core: RankProtocol) -> None:
    """Messages are accepted from and for any incarnation, as long as engine and rank are right."""

    def message(original: Callable[..., None], name: PeerName, body: Message, now_s: float) -> None:
        engine, _, rest = name.partition("/")
        rank = rest.rpartition("/")[2]
        for known in core._peers:
            if known.partition("/")[0] == engine and known.rpartition("/")[2] == rank:
                name = known
        original(name, readdressed(body, core._incarnation), now_s)

    _patch(core, "message", message)


class _AnyPrompt(Prompt):
    """A prompt that is the same as any other."""

    def agreement(self, stated: StatedPrompt) -> Agreement:
        """Says so."""
        return Agreement(stated.num_tokens, whole=True)


def binding_not_checked(core: RankProtocol) -> None:
    """Prefill hands over what it has, for whatever prompt decode asks (R51)."""

    def offer(original: Callable[..., None], order: Offer, now_s: float) -> None:
        original(replace(order, prompt=_AnyPrompt(b"")), now_s)

    _patch(core.prefill, "offer", offer)


def first_token_not_bound(core: RankProtocol) -> None:
    """Decode takes prefill's first token, also after a part of the prompt (R51)."""
    decode = core.decode

    def land(original: Callable[..., None], receive: Any, now_s: float) -> None:
        original(receive, now_s)
        if decode.landed[-1].difference:
            decode.landed[-1] = replace(decode.landed[-1], note=b"note")

    _patch(decode, "_land", land)


def confirm_before_write(core: RankProtocol) -> None:
    """Prefill reports a write when it starts it, and decode confirms when it starts to read."""

    def take(original: Callable[..., list[Action]]) -> list[Action]:
        taken: list[Action] = []
        for action in original():
            if isinstance(action, Post) and action.message is not None:
                taken.append(Send(action.peer, action.message))
            taken.append(action)
        return taken

    _patch(core, "take_actions", take)


def abort_releases_at_once(core: RankProtocol) -> None:
    """A cancelled hand-off releases its blocks without waiting for the peer."""
    decode = core.decode

    def cancel(original: Callable[..., None], order: Any, now_s: float) -> None:
        original(order, now_s)
        receive = decode._receives.get(order.transfer)
        if receive is not None:
            for source in receive.sources.values():
                source.in_flight.clear()
                source.state = type(source.state).QUIET
            decode._advance(receive, now_s)

    def completed(original: Callable[..., bool], post: Any, *args: Any, **kwargs: Any) -> bool:
        key = decode._outgoing._reads.get(post)
        if key is not None and post not in key[1].in_flight:
            del decode._outgoing._reads[post]
            return True
        return original(post, *args, **kwargs)

    _patch(decode, "cancel", cancel)
    _patch(decode, "completed", completed)


MUTANTS: Mapping[str, Mutant] = {
    function.__name__.replace("_", "-"): function
    for function in (
        free_while_writing,
        first_failed_rank_frees,
        reported_before_survivors,
        completion_overwrites,
        scan_stops_at_live,
        wrong_heartbeat_id,
        failure_not_reported,
        stale_registration,
        old_incarnation,
        confirm_before_write,
        abort_releases_at_once,
        binding_not_checked,
        first_token_not_bound,
    )
}
