"""What an engine can never serve: refused before it is queued, whatever runs at the time."""

import numpy as np

from kvferry.engines.mini.api import GenerateRequest
from kvferry.engines.mini.scheduling.block_manager import BlockManager
from kvferry.engines.mini.scheduling.cache_groups import Groups
from kvferry.errors import RequestError, RequestTooLong

__all__ = ["Limits"]


class Limits:
    """The limits of one engine. They never change, so any thread may ask."""

    def __init__(self, groups: Groups, blocks: BlockManager, *, max_model_len: int, vocab_size: int) -> None:
        self._groups = groups
        self._num_blocks = blocks.num_usable
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    def check(self, spec: GenerateRequest) -> None:
        """Raises RequestError for a request that cannot be served here, and RequestTooLong if it is too long."""
        prompt, vocab = spec.prompt_token_ids, self._vocab_size
        if not prompt:
            raise RequestError("the prompt has no tokens. Send at least one.")
        if _has_other_ids(spec, vocab):
            wrong = next(token for token in prompt if not 0 <= token < vocab)
            raise RequestError(f"the prompt has the token id {wrong!r}; this model has ids 0 to {vocab - 1}.")
        for_remote = spec.handoff is not None and spec.handoff.do_remote_decode
        self.check_length(len(prompt), 1 if for_remote else spec.sampling.max_tokens)

    def check_length(self, num_prompt: int, max_tokens: int) -> None:
        """Raises RequestTooLong if a prompt and its answer are longer than the context, or than the whole cache."""
        if num_prompt + max_tokens > self._max_model_len:
            raise RequestTooLong(
                f"{num_prompt} prompt tokens and max_tokens={max_tokens} are more than the model's context of "
                f"{self._max_model_len}. Shorten the prompt, or ask for at most "
                f"{max(0, self._max_model_len - num_prompt)} tokens."
            )
        if self._groups.need(num_prompt + max_tokens - 1) > self._num_blocks:
            raise RequestTooLong(
                f"{num_prompt} prompt tokens and max_tokens={max_tokens} are more than this worker's cache of "
                f"{self._groups.room_tokens()} tokens. Shorten the prompt, ask for less, or start the worker with a "
                "larger cache_bytes (--cache-gb)."
            )


def _has_other_ids(spec: GenerateRequest, vocab_size: int) -> bool:
    if spec.packed:  # a hundredth of the time; the server packs nothing below 0
        return bool(np.frombuffer(spec.packed, "<u4").max() >= vocab_size)
    prompt = spec.prompt_token_ids
    return min(prompt) < 0 or max(prompt) >= vocab_size  # a tenth of the time of a look at each
