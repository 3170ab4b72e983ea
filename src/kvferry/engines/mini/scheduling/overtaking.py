"""Who may be admitted while an older request finds no room: large prompts wait for a bounded time, small ones do not
wait for a whole answer of others.

A request that finds no blocks for its prompt lets newer ones pass until it has waited `overtake_s`. From then on it has
a claim on every block that becomes free. A newer request then passes only if it cannot delay the one with the claim:
it will have ended before enough of the requests that ran when the claim began can have ended. So the claim is met when
those have ended, at the latest. Both times are counted in steps, for the longest possible answers: an answer grows by
at least one token per step.
"""

from collections.abc import Iterable

from kvferry.engines.mini.scheduling.request import Request, State

__all__ = ["Claim", "Overtaking"]


class Claim:
    """What the oldest request without room is waiting for."""

    def __init__(self, request: Request, running: Iterable[Request]) -> None:
        """`running`: the requests that have blocks now."""
        self.request = request
        self.num_missing = 0
        """How many blocks it lacks now."""
        self._before = list(running)

    def steps_left(self) -> int:
        """Returns after how many steps, at most, the requests that ran when the claim began have given back what it
        lacks; 0 if they do not have that many blocks, or none is left."""
        num_missing = self.num_missing
        self._before = [one for one in self._before if one.state in (State.RUNNING, State.WAITING_FOR_KV)]
        for one in sorted(self._before, key=_answer_left):
            num_missing -= len(one.block_ids)
            if num_missing <= 0:
                return _answer_left(one)
        return 0


class Overtaking:
    """The rule of one scheduler."""

    def __init__(self, overtake_s: float, *, max_batch_tokens: int) -> None:
        self._overtake_s = overtake_s
        self._max_batch_tokens = max_batch_tokens
        self._claim: Claim | None = None

    def no_room(self, request: Request, num_missing: int, running: Iterable[Request], now_s: float) -> None:
        """The request lacks `num_missing` blocks. It gets a claim if it has waited long enough, and no older one has a
        claim."""
        claim = self._claim
        if claim is None or claim.request.state is not State.WAITING or request.number < claim.request.number:
            claim = self._claim = Claim(request, running) if now_s - request.arrived_s >= self._overtake_s else None
        if claim is not None and claim.request is request:
            claim.num_missing = num_missing

    def admitted(self, request: Request) -> None:
        """The request has got its blocks: a claim of it is met."""
        if self._claim is not None and self._claim.request is request:
            self._claim = None

    def may_pass(self, request: Request) -> bool:
        """Returns whether the request may be admitted if it finds room."""
        claim = self._claim
        if claim is None or claim.request.state is not State.WAITING or request.number <= claim.request.number:
            return True
        if request.for_remote:
            return False  # its blocks are held for another engine after its end, no one knows for how long
        prompt_steps = -(-request.num_uncomputed // self._max_batch_tokens)
        return prompt_steps + _answer_left(request) <= claim.steps_left()


def _answer_left(request: Request) -> int:
    """Returns the most steps that the request's answer can still take."""
    return request.answer.max_tokens_left
