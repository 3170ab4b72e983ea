"""Serving for `python -m benchmarks.spec`: one engine alone, or a prefill and a decode engine, all in this process.

The pair is two whole workers: they shake hands over the side channel, and the configured transport moves the KV.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvferry.engines.mini.api import GenerateRequest, Output, TokenLogprobs
from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.worker import Worker, WorkerSettings, build_worker
from kvferry.errors import PeerError
from kvferry.settings import FerrySettings, LeaseSettings, Role, TransferMode, TransferSettings
from kvferry.wire.params import HandoffParams
from tests.harness.until import let_threads_run

__all__ = ["Alone", "Pair", "Served", "Serving"]

GIVE_UP_S = 120.0
POLL_S = 0.0003


@dataclass(slots=True)
class Served:
    """The answer to one request."""

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """When each token came, in the time of time.perf_counter."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token, if they were asked for."""
    last: Output | None = None
    """The last output, with the account of the prompt."""

    def take(self, output: Output) -> None:
        """Adds one more output."""
        self.tokens += output.token_ids
        self.logprobs += output.logprobs
        self.times_s += [time.perf_counter()] * len(output.token_ids)
        self.last = (
            output if output.account is not None or self.last is None else replace(output, account=self.last.account)
        )

    @property
    def ended(self) -> bool:
        """True if the answer is complete."""
        return self.last is not None and self.last.finish_reason is not None


class Serving(ABC):
    """Anything that answers requests."""

    engine: Engine
    """The engine that decodes."""

    @abstractmethod
    def serve(self, requests: Sequence[GenerateRequest]) -> list[Served]:
        """Answers all requests at once, in one batch as far as they fit. Blocks. Raises PeerError if nothing moves."""

    def close(self) -> None:
        """Ends all engines."""
        self.engine.close()


class Alone(Serving):
    """One engine that answers alone."""

    def __init__(self, settings: EngineSettings) -> None:
        self.engine = Engine.load(settings)

    def serve(self, requests: Sequence[GenerateRequest]) -> list[Served]:
        """Answers all requests on the one engine."""
        served = {request.request_id: Served() for request in requests}
        for request in requests:
            self.engine.add(request)
        while not all(one.ended for one in served.values()):
            for output in self.engine.step():
                served[output.request_id].take(output)
        return list(served.values())


class Pair(Serving):
    """A prefill worker and a decode worker."""

    def __init__(
        self,
        prefill: EngineSettings,
        decode: EngineSettings,
        *,
        mode: TransferMode = TransferMode.PULL,
        transport: str = "memory",
        first_token: bool = True,
        lease: LeaseSettings | None = None,
    ) -> None:
        """Starts both. If `first_token` is true, prefill hands over the first token of the answer."""
        self._lease = lease or LeaseSettings()
        transfer = TransferSettings(mode=mode, transport=transport, staging_bytes=0, first_token=first_token)
        self._mode = mode
        self._count = 0
        self.prefill = self._worker(prefill, transfer, Role.PREFILL)
        try:
            self.decode = self._worker(decode, transfer, Role.DECODE)
        except BaseException:
            self.prefill.close()
            raise
        self.engine = self.decode.engine

    def _worker(self, engine: EngineSettings, transfer: TransferSettings, role: Role) -> Worker:
        ferry = FerrySettings(transfer=transfer, lease=self._lease)
        return build_worker(WorkerSettings(engine=engine, ferry=ferry, role=role))

    def close(self) -> None:
        """Ends both engines."""
        self.decode.close()
        self.prefill.close()

    def serve(self, requests: Sequence[GenerateRequest]) -> list[Served]:
        """Prefills all requests on one engine, and decodes them on the other."""
        served = {request.request_id: Served() for request in requests}
        asked = {request.request_id: request for request in requests}
        for request in requests:
            self._count += 1
            params = HandoffParams(
                do_remote_decode=True, transfer_id=f"bench-{self.decode.identity.engine}-{self._count}"
            )
            self.prefill.engine.add(replace(request, handoff=params, sampling=replace(request.sampling, max_tokens=1)))
            if self._mode is TransferMode.PUSH:
                self.engine.add(replace(request, handoff=self._address(params)))
        give_up_s = time.monotonic() + GIVE_UP_S
        while not all(one.ended for one in served.values()):
            for output in self.prefill.engine.step():
                if output.finish_reason is not None and self._mode is TransferMode.PULL:
                    self.engine.add(replace(asked[output.request_id], handoff=output.handoff))
            for output in self.engine.step():
                served[output.request_id].take(output)
            if not self.engine.scheduler.running and not self.prefill.engine.scheduler.running:
                let_threads_run(POLL_S)
            if time.monotonic() > give_up_s:
                raise PeerError(f"no answer in {GIVE_UP_S:g} s: {self.engine.stats()}")
        self._settle(give_up_s)
        return list(served.values())

    def _settle(self, give_up_s: float) -> None:
        """Steps until hand-offs have released all blocks."""
        while self.engine.has_work() or self.prefill.engine.has_work():
            self.prefill.engine.step()
            self.engine.step()
            let_threads_run(POLL_S)
            if time.monotonic() > give_up_s:
                raise PeerError(f"hand-offs stay open: {self.prefill.engine.stats()}, {self.engine.stats()}")

    def _address(self, params: HandoffParams) -> HandoffParams:
        identity = self.prefill.identity
        return HandoffParams(
            do_remote_prefill=True,
            transfer_id=params.transfer_id,
            transfer_mode=self._mode,
            remote_engine_id=identity.engine,
            remote_host=identity.host,
            remote_port=identity.port,
        )
