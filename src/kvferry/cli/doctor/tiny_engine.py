"""An engine without a model: its cache holds numbers made from tokens and positions, so every byte can be predicted.

It has a real connector: side channel, handshake, driver, transport, leases and digests are those of every engine.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvferry import __version__
from kvferry.connector.base import Outcome
from kvferry.connector.engine import EngineConnector
from kvferry.connector.peers import PeerStatus, PeerView
from kvferry.connector.worker import start_worker
from kvferry.errors import TransferError
from kvferry.handoff.orders import Landed
from kvferry.handshake.engine_description import EngineDescription
from kvferry.ids import RequestId, TransferId
from kvferry.layout.blocks import BlockTable
from kvferry.layout.builders import block_major, head_range
from kvferry.settings import FailurePolicy, FerrySettings, Role
from kvferry.wire.params import HandoffParams
from kvferry.wire.prompt_digest import Prompt

__all__ = ["TOKEN_BYTES", "TinyEngine", "prompt_of"]

LAYERS, HEADS, HEAD_DIM = tuple(f"layers.{number}.attn" for number in range(4)), 4, 128
TOKEN_BYTES = len(LAYERS) * 2 * HEADS * HEAD_DIM * 4
"""The bytes of KV per token: 4 layers of K and V, 4 heads of 128 numbers, float32."""
_PRIME = 65_521


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Returns a prompt: the same one for the same seed on every machine."""
    return [int(one) for one in np.random.default_rng(seed).integers(0, 50_000, num_tokens)]


@dataclass(eq=False)
class _Request:
    """What the scheduler half reads of a request (connector.base.RequestView), and its blocks."""

    request_id: RequestId
    """The transfer id: a request of the doctor is one hand-off."""
    tokens: list[int]
    handoff: HandoffParams | None
    blocks: tuple[int, ...]
    on_failure: FailurePolicy | None = FailurePolicy.RECOMPUTE

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)

    @cached_property
    def prompt(self) -> Prompt:
        return Prompt.of(self.tokens)

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        return (BlockTable(0, 0, self.blocks),)


class TinyEngine:
    """One engine of one rank. Any thread may call any method; `start` makes a thread that steps it."""

    def __init__(
        self, role: Role, settings: FerrySettings, *, num_tokens: int, block_tokens: int, model: str = "doctor"
    ) -> None:
        """Binds a side channel and registers a cache for `num_tokens`. Raises ConfigError if either cannot be done."""
        self.num_blocks = -(-num_tokens // block_tokens)
        self._block_tokens = block_tokens
        self._cache = np.zeros((self.num_blocks, len(LAYERS), 2, HEADS, block_tokens, HEAD_DIM), np.float32)
        self._free = set(range(self.num_blocks))
        self._held: dict[TransferId, tuple[int, ...]] = {}
        self._landed: dict[TransferId, Landed] = {}
        self._failed: dict[TransferId, str] = {}
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        mode = settings.transfer.mode
        layout = block_major(
            LAYERS, num_blocks=self.num_blocks, block_tokens=block_tokens, heads=head_range(HEADS, 0, 1),
            head_dim=HEAD_DIM, element_bytes=4, encoding="fp32", address=self._cache.ctypes.data,
        )  # fmt: skip
        description = EngineDescription(
            engine="doctor", engine_version=__version__, role=role, mode=mode, model_id=model, dtype="float32",
            total_kv_heads=HEADS, head_size=HEAD_DIM, hidden_layers=len(LAYERS), attention_backend="numpy",
            block_tokens=(block_tokens,),
        )  # fmt: skip
        name = f"doctor-{role}-{mode}-{np.random.default_rng().integers(1 << 32):08x}"
        self._connector = EngineConnector(description, settings, engine_id=name)
        try:
            self._worker = start_worker(
                layout, [self._cache], engine=self._connector.engine_id, settings=settings,
                on_lost=self._connector.lost, on_report=self._wake.set,
            )  # fmt: skip
        except BaseException:
            self._connector.close()
            raise
        self._half = self._connector.start([self._worker.record], self._worker.start_step)

    @property
    def address(self) -> dict[str, object]:
        """The engine's name, host and side-channel port, as JSON values."""
        identity = self._connector.identity
        return {"engine": identity.engine, "host": identity.host, "port": identity.port}

    @property
    def num_blocks_in_use(self) -> int:
        """The number of blocks that a request or a peer holds."""
        self._step()
        return self.num_blocks - len(self._free)

    def start(self) -> None:
        """Starts a thread that steps the engine until `close`."""
        self._thread = threading.Thread(target=self._run, name="kvferry-doctor-engine", daemon=True)
        self._thread.start()

    def meet(self, engine: str, host: str, port: int, timeout_s: float) -> tuple[PeerView, list[str]]:
        """Shakes hands. Returns the peer, and a note for each difference that is bridged. Raises TransferError."""
        view = PeerView(PeerStatus.ASKING)

        def met() -> bool:
            nonlocal view
            with self._lock:
                view = self._connector.preconnect(engine, None, host, port)
            return view.status is not PeerStatus.ASKING

        self._until(met, timeout_s, f"the handshake with {host}:{port}")
        peers = self._connector.describe()["peers"]
        assert isinstance(peers, list), "describe() lists the peers"
        return view, [note for peer in peers if peer["engine"] == engine for note in peer["notes"]]

    def prefill(self, prompt: list[int], transfer: str) -> HandoffParams | None:
        """Computes a prompt and offers its KV under this transfer id. Returns what decode is to be given."""
        with self._lock:
            request = self._request(prompt, HandoffParams(do_remote_decode=True, transfer_id=transfer))
            for index, block in enumerate(request.blocks):
                self._cache[block] = self._computed(prompt, index)
            self._half.computed(request, request.tables, len(prompt))
            params = self._end(request, aborted=False)
        self._step()
        return params

    def decode(self, prompt: list[int], params: HandoffParams, timeout_s: float) -> Landed:
        """Takes the prompt's KV from prefill and compares each byte with what it must be.

        Raises TransferError with the reason if it does not arrive, or if it is wrong.
        """
        with self._lock:
            request = self._request(prompt, params)
        try:
            return self._fetch(request, timeout_s)
        finally:
            with self._lock:
                self._end(request, aborted=True)

    def _end(self, request: _Request, *, aborted: bool) -> HandoffParams | None:
        """Ends a request. Its blocks are free at once, or when `_take` learns that no peer touches them any more."""
        held, params = self._half.request_finished(
            request, request.tables, request.num_prompt_tokens, first_token=None, aborted=aborted
        )
        if held is None:
            self._free.update(request.blocks)
        else:
            self._held[held] = request.blocks
        return params

    def _fetch(self, request: _Request, timeout_s: float) -> Landed:
        matched, reason = 0, ""

        def matches() -> bool:
            nonlocal matched, reason
            with self._lock:
                match = self._half.match(request, 0)
            matched, reason = match.num_tokens, match.reason or match.error
            return not match.wait

        self._until(matches, timeout_s, "the peer")
        if matched != request.num_prompt_tokens:
            raise TransferError(reason or f"only {matched} of {request.num_prompt_tokens} tokens are handed over")
        with self._lock:
            self._half.after_alloc(request, request.tables, 0)
        transfer = TransferId(request.request_id)
        self._until(lambda: transfer in self._landed or transfer in self._failed, timeout_s, "the KV")
        if transfer in self._failed:
            raise TransferError(self._failed.pop(transfer))
        self._compare(request)
        return self._landed.pop(transfer)

    def _compare(self, request: _Request) -> None:
        left = request.num_prompt_tokens
        for index, block in enumerate(request.blocks):
            tokens = min(self._block_tokens, left - index * self._block_tokens)
            want = self._computed(request.tokens, index)[..., :tokens, :]
            if not np.array_equal(self._cache[block][..., :tokens, :], want):
                raise TransferError(
                    f"bytes differ in block {index} of {len(request.blocks)}, which holds the tokens from "
                    f"{index * self._block_tokens} on"
                )

    def _computed(self, prompt: list[int], index: int) -> npt.NDArray[np.float32]:
        """Returns the content of the prompt's block number `index`: a mix of token, position, layer, head and dim."""
        at = np.arange(index * self._block_tokens, (index + 1) * self._block_tokens)
        tokens = np.array([prompt[one] if one < len(prompt) else 0 for one in at], np.int64)
        of_token = (tokens * 7919 + at * 104_729) % _PRIME
        of_place = np.arange(len(LAYERS) * 2 * HEADS * HEAD_DIM).reshape(len(LAYERS), 2, HEADS, 1, HEAD_DIM) * 31
        return ((of_token[:, None] + of_place) % _PRIME).astype(np.float32)

    def _request(self, prompt: list[int], handoff: HandoffParams) -> _Request:
        num_blocks = -(-len(prompt) // self._block_tokens)
        if num_blocks > len(self._free):
            raise TransferError(f"{num_blocks} blocks are needed and {len(self._free)} of {self.num_blocks} are free")
        # From both ends in turn, so that blocks are scattered as in an engine that has run for a while.
        free = sorted(self._free)
        blocks = tuple(free.pop(0 if one % 3 else -1) for one in range(num_blocks))
        self._free.difference_update(blocks)
        request = _Request(RequestId(handoff.transfer_id or ""), prompt, handoff, blocks)
        self._half.on_new_request(request)
        return request

    def _step(self) -> None:
        with self._lock:
            self._take(self._half.update([self._worker.end_step()]))
            self._worker.start_step(self._half.build_orders())

    def _take(self, outcome: Outcome) -> None:
        self._landed.update({one.transfer: one for one in outcome.landed})
        self._failed.update({one.transfer: one.reason for one in (*outcome.failed, *outcome.fatal)})
        for transfer in outcome.released:
            self._free.update(self._held.pop(transfer, ()))

    def _until(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        end_s = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > end_s:
                raise TransferError(f"{what} has not come within {timeout_s:.1f} s")
            self._wake.wait(0.001)
            self._wake.clear()
            self._step()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(0.005)
            self._wake.clear()
            self._step()

    def close(self) -> None:
        """Ends the thread, the connector and the worker half. Idempotent."""
        self._closed = True
        if self._thread is not None:
            self._thread.join()
        self._connector.close()
        self._worker.close()
