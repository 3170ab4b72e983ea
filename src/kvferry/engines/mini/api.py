"""The records that go into the embedded engine and come out of it: requests, sampling parameters, outputs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.errors import RequestError
from kvferry.ids import RequestId
from kvferry.settings import FailurePolicy
from kvferry.stats import HandoffTiming, PromptAccount, StageTimes
from kvferry.wire.params import HandoffParams

__all__ = [
    "SAMPLING_BOUNDS",
    "Failure",
    "FinishReason",
    "GenerateRequest",
    "Output",
    "SamplingParams",
    "TokenLogprobs",
    "failure_text",
]


SAMPLING_BOUNDS: Mapping[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "temperature": (0.0, 100.0),
    "top_k": (0, 2**31 - 1),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-9, 100.0),
    "logprobs": (0, 1024),
    "seed": (-(2**64), 2**64),
}
"""The range of each number of SamplingParams. Outside of it a value could overflow in a tensor."""
_MAX_STOPS = 64
_MAX_STOP_CHARS = 1000
_MAX_IDS = 1024


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Failure(StrEnum):
    """Whose fault an error is. The value is the code of the error that the client receives."""

    REQUEST_FAILED = "request_failed"
    """Computing this request raises an exception, and computing the others without it does not."""
    HANDOFF_FAILED = "handoff_failed"
    """The prompt's KV did not arrive, and the policy is to fail."""
    ENGINE_CRASHED = "engine_crashed"
    """The engine, or one of its processes, ended in a step that computed this request."""
    ENGINE_DEAD = "engine_dead"
    """The engine, or one of its processes, ended while this request waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. Values are checked: RequestError names the field, its value and the range."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """How many of the most likely tokens are considered; 0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """Random number i of a seeded request depends on (seed, i) only: it is the same after preemption and hand-off."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """How many of the most likely tokens to report besides the chosen one; None: no logprobs."""

    def __post_init__(self) -> None:
        for name, (low, high) in SAMPLING_BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise RequestError(f"{name}={value!r} is out of range: send {low:g} to {high:g}, or leave it out")
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens!r} is above max_tokens={self.max_tokens!r}: lower it")
        if "" in self.stop:
            raise RequestError("stop: an empty string would end every answer at once: remove it")
        if len(self.stop) > _MAX_STOPS:
            raise RequestError(f"stop: {len(self.stop)} strings; send at most {_MAX_STOPS}")
        if any(len(stop) > _MAX_STOP_CHARS for stop in self.stop):
            raise RequestError(f"stop contains a string of over {_MAX_STOP_CHARS} characters: remove it")
        if len(self.stop_token_ids) > _MAX_IDS or len(self.logit_bias) > _MAX_IDS:
            raise RequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries and logit_bias {len(self.logit_bias)}; "
                f"send at most {_MAX_IDS} of each"
            )
        if any(token < 0 for token in (*self.stop_token_ids, *self.logit_bias)):
            raise RequestError("stop_token_ids and logit_bias: a token id is below 0; token ids begin at 0")
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise RequestError(f"logit_bias[{token}]={bias!r} is out of range: send -100 to 100")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to compute; a client's request with `n` choices is n of these."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    packed: bytes = b""
    """The same ids, if they are packed already (wire.prompt_digest.pack_tokens)."""
    sampling: SamplingParams
    salt: str = ""
    """What the KV depends on besides the tokens (wire.salt): requests with different salts share none."""
    handoff: HandoffParams | None = None
    """kv_transfer_params: compute only the prompt, for another engine; or take the prompt's KV from another engine."""
    on_failure: FailurePolicy | None = None
    """What to do if that KV does not arrive; None: as the worker's settings say."""
    first_token_sent: bool = False
    """The client has the hand-off's first token already: continue from it, whether or not the KV arrives."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token's log probability, and the most likely ones, best first, as (token id, log probability)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What one step added to one request."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    """The new tokens."""
    text: str = ""
    """The new text: complete characters only, without an end that may be the start of a stop string."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per new token, if they were requested."""
    finish_reason: FinishReason | None = None
    """Set once, on the last Output of a request."""
    stop_reason: int | str | None = None
    """The stop token or string that ended it."""
    error: str | None = None
    """What happened and the remedy, if finish_reason is ERROR."""
    failure: Failure = Failure.REQUEST_FAILED
    """Whose fault it is, if finish_reason is ERROR."""
    account: PromptAccount | None = None
    """Where the prompt's KV came from. Set on the first Output with tokens, and on the last one."""
    handoff: HandoffParams | None = None
    """What decode needs. Set on the last Output of a do_remote_decode request."""
    prompt_hashes: tuple[bytes, ...] = ()
    """The hashes of the prompt's whole blocks, if there is a prefix cache. Set where `handoff` is set."""
    timing: HandoffTiming | None = None
    """Set on the last Output of a request whose KV came from another engine."""
    stages: StageTimes | None = None
    """Set on the last Output."""


def failure_text(error: Exception) -> str:
    """Returns the message for the client of a request that raises whenever it is computed."""
    return (
        f"computing this request raised {type(error).__name__}: {error}. Other requests go on; change this one, and "
        "report it with the worker's log"
    )
