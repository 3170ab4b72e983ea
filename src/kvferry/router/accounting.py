"""What a router learns and counts from workers' answers: lengths, cached blocks, costs, and how hand-offs went."""

import base64
import binascii
import logging
import time
from collections.abc import Mapping

from kvferry.router.answer.account import HandoffOutcome, handed_over_tokens, outcome_of, prompt_tokens
from kvferry.router.client_body import ClientBody, PrefillAnswer
from kvferry.router.context import RouterContext
from kvferry.router.fleet.prefixes import Prompt, unpack_hashes
from kvferry.router.fleet.worker import Worker

__all__ = ["note_answer", "note_length", "note_prefill"]

logger = logging.getLogger(__name__)


def note_prefill(
    context: RouterContext, prefill: Worker, answer: PrefillAnswer, body: ClientBody, prompt: Prompt, after_s: float
) -> None:
    """Learns from prefill's answer: the prompt's length, its blocks, and how long prefill took (`after_s`)."""
    context.metrics.on_prefill(after_s)
    num_tokens = answer.usage.prompt_tokens if answer.usage is not None else 0
    context.prefixes.learn_length(body.prompt_size, body.num_prompt_ids, num_tokens)
    if num_tokens:
        prompt.counted(num_tokens)
    if answer.kvferry is not None:
        context.cost.on_prefill(answer.kvferry.recomputed, after_s)
    elif num_tokens:
        context.cost.on_prefill(num_tokens, after_s)
    if answer.prompt_blocks and prefill.info is not None:
        try:
            hashes = unpack_hashes(base64.b64decode(answer.prompt_blocks, validate=True))
        except binascii.Error:
            return  # this only costs a better choice of workers later
        size = prefill.info.limits.block_tokens
        context.prefixes.learn(prompt, hashes, num_tokens, size, body.prompt_size)


def note_length(context: RouterContext, headers: Mapping[str, str], body: ClientBody, prompt: Prompt) -> None:
    """Learns the prompt's length from an answer's headers, if prefill has not counted it."""
    if not prompt.exact and (num_tokens := prompt_tokens(headers)):
        context.prefixes.learn_length(body.prompt_size, body.num_prompt_ids, num_tokens)
        prompt.counted(num_tokens)


def note_answer(
    context: RouterContext, prefill: Worker | None, decode: Worker, headers: Mapping[str, str], *, route: str,
    status: int, streamed: bool, prefilled_s: float | None,
) -> None:  # fmt: skip
    """Counts an answer that begins. `headers` are those for the client; `prefilled_s` is when prefill had answered.

    The first byte of an answer that is not streamed comes at its end, so it says nothing about what a hand-off costs.
    """
    now_s = time.monotonic()
    context.metrics.on_route(route)
    context.metrics.on_tokens(headers)
    if route == "alone":
        context.alarm.note(now_s, headers.get("x-kvferry-why", "no reason is known"))
    if prefill is None or status >= 400:
        return
    outcome = outcome_of(headers)
    pair = context.fleet.pairs.of(prefill, decode)
    if outcome is HandoffOutcome.FAILED:
        reason = headers.get("x-kvferry-why", "")
        context.alarm.note(now_s, reason)
        if pair.fail(now_s, reason):
            logger.warning("pair left alone prefill=%s decode=%s cause=%s", prefill.name, decode.name, reason)
    elif outcome is HandoffOutcome.UNKNOWN:
        pair.unknown += 1  # its own counters go to the alarm: see Fleet.on_handoffs
    else:
        pair.landed += 1
        pair.handed_over_tokens += handed_over_tokens(headers)
        pair.breaker.succeeded()
        context.alarm.note(now_s, None)
    if streamed and outcome is not HandoffOutcome.FAILED and prefilled_s is not None:
        context.cost.on_handoff(now_s - prefilled_s)
        context.metrics.on_handoff(now_s - prefilled_s)
    context.metrics.on_pair(prefill.name, decode.name, outcome=outcome, headers=headers)
