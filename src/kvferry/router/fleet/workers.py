"""The fleet: which workers are in it, how each of them is, which pairs fit, and which worker serves a request.

Workers come and go by flag, by file, by registration and by etcd (see `discovery` and `etcd_watch`). A worker that
leaves gets no new requests; its open requests go on.

A worker is silent from the first health check that gets no answer at all. Any answer ends the silence, and so does a
refused connection: if the process has ended, its open connections have ended with it. Once a worker has been silent for
`hung_after_s`, each further check without an answer ends the waits for the worker that have lasted at least as long:
its process was stopped, or the network is lost. The checks decide, not a timer, so a router that was itself suspended
asks again before it gives up.
"""

import asyncio
import errno
import logging
import math
import time
from collections.abc import Callable, Container, Sequence
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvferry.errors import ConfigError
from kvferry.router.fleet.pair_records import Pairs
from kvferry.router.fleet.policies import PromptEstimate, make_policy
from kvferry.router.fleet.prefixes import unpack_hashes
from kvferry.router.fleet.probes import NotAWorker, ask_what_it_is, ask_which_models
from kvferry.router.fleet.worker import Cached, Source, Worker, find_conflicts
from kvferry.router.settings import Fetch, PolicyName, RouterSettings
from kvferry.settings import Role
from kvferry.web.records import WorkerInfo

__all__ = ["Fleet", "check_url", "long_enough", "reason_of"]

logger = logging.getLogger(__name__)

_FEW_HASHES_BYTES = 64 << 10
"""Up to this size, hashes become a set at once, in a millisecond."""
_HOST_IS_SILENT = frozenset({errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})
"""Errors that mean that the host does not answer at all. Other errors, such as a refused connection or an unknown name,
are an answer."""
_NO_ANSWER = "answered its health checks"
_NO_CONNECTION = "accepted a connection"


def check_url(url: str, what: str = "worker address") -> None:
    """Raises ConfigError if `url` is not the address of a worker, or of what `what` says."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{what} {url!r} must begin with http:// or https://: give http://HOST:PORT")
    try:
        host, _ = urlsplit(url).hostname, urlsplit(url).port
        (host or "").encode("idna")  # as the resolver does, which would raise this UnicodeError in the health check
    except ValueError as error:
        raise ConfigError(f"{what} {url!r} is not valid: {error}. Give http://HOST:PORT") from error
    if not host:
        raise ConfigError(f"{what} {url!r} names no host: give http://HOST:PORT")


class Fleet:
    """All workers of a router. It asks each of them regularly how it is. Everything runs on the event loop."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], settings: RouterSettings) -> None:
        self._settings = settings
        self.prefill = [Worker(url, Role.PREFILL, settings) for url in prefill]
        self.decode = [Worker(url, Role.DECODE, settings) for url in decode]
        self.pairs = Pairs(settings)
        self._policies = {
            Role.PREFILL: make_policy(settings.prefill_policy),
            Role.DECODE: make_policy(settings.decode_policy),
        }
        self._prefix_aware = PolicyName.PREFIX_AWARE in (settings.prefill_policy, settings.decode_policy)
        self._wants_blocks = self._prefix_aware or settings.local_below != "0" or settings.fetch is not Fetch.NEVER
        self._session: aiohttp.ClientSession | None = None
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._asking: dict[Worker, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._left: dict[Worker, float] = {}
        """When usable decode workers left the fleet (monotonic), as registered ones do before they restart."""
        self._models_asked_s = -math.inf
        self.on_up: list[Callable[[Worker], None]] = []
        """Callbacks for a worker that is up: for the first time, again, or as a new process. They must not block."""
        self.on_handoffs: list[Callable[[Worker, int, int], None]] = []
        """Called with the number of hand-offs that have landed and failed on a worker whose answers do not say it."""
        self.on_gone: list[Callable[[Worker], None]] = []
        """Callbacks for a worker that leaves the fleet. They must not block."""

    @property
    def workers(self) -> list[Worker]:
        """All workers: prefill first, then decode."""
        return [*self.prefill, *self.decode]

    @property
    def wants_pieces(self) -> bool:
        """True if prompts are compared with what workers have cached."""
        return self._wants_blocks

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Asks every worker once, then keeps asking until `stop`."""
        self._session = session
        await asyncio.gather(*(self.ask(session, worker) for worker in self.workers))
        for worker in self.workers:
            if worker not in self._tasks:
                self._tasks[worker] = asyncio.create_task(self._keep_asking(session, worker, at_once=False))

    async def stop(self) -> None:
        """Stops asking."""
        tasks, self._tasks = [*self._tasks.values(), *self._asking.values()], {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- membership ----

    def find(self, url: str, role: Role) -> Worker | None:
        """Returns the worker of this address in this role, if it is in the fleet."""
        own = self.prefill if role is Role.PREFILL else self.decode
        return next((worker for worker in own if worker.url == url.rstrip("/")), None)

    def add(self, url: str, role: Role, source: Source) -> Worker:
        """Adds a worker and returns it; one that is in the fleet already stays as it is. Raises ConfigError if `url` is
        not the address of a worker."""
        known = self.find(url, role)
        if known is not None:
            return known
        check_url(url)
        worker = Worker(url, role, self._settings, source)
        (self.prefill if role is Role.PREFILL else self.decode).append(worker)
        logger.info("worker added url=%s role=%s source=%s", worker.url, role, source)
        if self._session is not None:
            self._tasks[worker] = asyncio.create_task(self._keep_asking(self._session, worker, at_once=True))
        return worker

    def remove(self, worker: Worker, reason: str) -> None:
        """Removes a worker. It gets no new requests; its open requests go on."""
        worker.gone = True
        if worker.assigned_role is Role.DECODE and worker.unusable_reason is None:
            now_s = time.monotonic()
            self._left = {one: left_s for one, left_s in self._left.items()
                          if left_s + self._settings.restart_wait_s > now_s} | {worker: now_s}  # fmt: skip
        for own in (self.prefill, self.decode):
            if worker in own:
                own.remove(worker)
        self.pairs.forget(worker)
        self._find_conflicts(worker.assigned_role)
        task = self._tasks.pop(worker, None)
        if task is not None:
            task.cancel()
        logger.info("worker removed url=%s cause=%s", worker.url, reason)
        for callback in self.on_gone:
            callback(worker)
        self.notify()

    # ---- health ----

    async def _keep_asking(self, session: aiohttp.ClientSession, worker: Worker, *, at_once: bool) -> None:
        if at_once:
            await self.ask(session, worker)
        while True:
            await asyncio.sleep(self._settings.health_every_s)
            await self.ask(session, worker)

    async def ask(self, session: aiohttp.ClientSession, worker: Worker) -> None:
        """Asks a worker what it is and how it is. Never raises: a failure becomes the worker's state."""
        timeout = aiohttp.ClientTimeout(
            total=self._settings.health_timeout_s, sock_connect=self._settings.connect_timeout_s
        )
        silence, asked_s = "", time.monotonic()
        try:
            info = await ask_what_it_is(session, worker, timeout)
            if self._wants_blocks and info.cache is not None and info.cache.version != worker.cached.version:
                worker.cached = await self._ask_blocks(session, worker, info, timeout)
            self._mark_up(worker, info)
            worker.reported(asked_s)
        except NotAWorker as error:
            self.mark_down(worker, str(error))
        except TimeoutError:
            silence = _NO_ANSWER
            self.mark_down(worker, f"no answer to GET /v1/kvferry in {self._settings.health_timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            silence = _silence_of(worker, error)
            self.mark_down(worker, reason_of(error))
        except (ValueError, OverflowError, RecursionError) as error:  # whatever it sends, it will be asked again
            self.mark_down(worker, f"its answer cannot be read: {reason_of(error)}")
        self._note_silence(worker, silence)
        self.notify()

    async def _ask_blocks(
        self, session: aiohttp.ClientSession, worker: Worker, info: WorkerInfo, timeout: aiohttp.ClientTimeout
    ) -> Cached:
        assert info.cache is not None, "only workers that report their blocks are asked for them"
        async with session.get(f"{worker.url}/v1/kvferry/blocks", timeout=timeout) as response:
            body = await response.read()
            if response.status != 200:
                return Cached(info.cache.version)
        if len(body) <= _FEW_HASHES_BYTES:
            return Cached(info.cache.version, frozenset(unpack_hashes(body)))
        return Cached(info.cache.version, await asyncio.to_thread(_set_of_hashes, body))

    def _note_silence(self, worker: Worker, silence: str) -> None:
        """Notes the end of a health check; `silence` is what the worker has not done, or empty if it has answered."""
        now_s = asyncio.get_running_loop().time()
        if not silence:
            worker.silent_since_s = None
        elif worker.silent_since_s is None:
            worker.silent_since_s = now_s
        elif (limit_s := self._settings.hung_after_s) and (for_s := now_s - worker.silent_since_s) >= limit_s:
            reason = f"has not {silence} for {for_s:.3g} s"
            if num_ended := worker.end_waits(now_s - limit_s, reason):
                logger.warning(
                    "worker hangs peer=%s url=%s ended=%d cause=%s", worker.name, worker.url, num_ended, reason
                )

    def _mark_up(self, worker: Worker, info: WorkerInfo) -> None:
        known = worker.info
        restarted = known is None or known.incarnation != info.incarnation
        came = worker.down is not None or restarted
        if came:
            logger.info("worker up peer=%s url=%s incarnation=%s", info.engine, worker.url, info.incarnation)
        elif known is not None and known.state != info.state:
            logger.info("worker changed peer=%s state=%s", info.engine, info.state)
        if restarted:
            worker.learned = None
            worker.breaker.succeeded()
        if known is not None and info.kind == "vllm" and worker.learned is not None:
            info = msgspec.structs.replace(info, engine=worker.learned.engine or info.engine)
        if known is not None and not restarted:
            self._note_handoffs(worker, known, info)
        was_usable = worker.unusable_reason is None
        worker.info, worker.down = info, None
        if was_usable and worker.unusable_reason is not None:
            worker.lost_s = time.monotonic()
        if came:
            worker.up_s = time.monotonic()
        if came or (known is not None and known.engine != info.engine):
            self._find_conflicts(worker.assigned_role)
        if came:
            for callback in self.on_up:
                callback(worker)

    def _note_handoffs(self, worker: Worker, before: WorkerInfo, now: WorkerInfo) -> None:
        if before.handoffs is None or now.handoffs is None or before.handoffs == now.handoffs:
            return
        landed = max(0, now.handoffs.landed - before.handoffs.landed)
        failed = max(0, now.handoffs.failed - before.handoffs.failed)
        for callback in self.on_handoffs:
            callback(worker, landed, failed)

    def mark_down(self, worker: Worker, reason: str) -> None:
        """Marks a worker as down: it is not used until it answers again."""
        if worker.unusable_reason is None:
            worker.lost_s = time.monotonic()
        if worker.down is None:
            logger.warning("worker down peer=%s url=%s cause=%s", worker.name, worker.url, reason)
            worker.down = reason
            self._find_conflicts(worker.assigned_role)
        worker.down = reason

    def _find_conflicts(self, role: Role) -> None:
        """Called when a worker came, went, or changed its engine id."""
        workers = self.prefill if role is Role.PREFILL else self.decode
        for rival in find_conflicts(workers):
            logger.warning("engine id is in use twice peer=%s url=%s", rival.name, rival.url)
            self.ask_soon(rival)

    def ask_soon(self, worker: Worker) -> None:
        """Asks a worker now rather than in its next turn: something has ended there, and a request waits for room. At
        most one such question per worker is open."""
        if self._session is not None and worker in self._tasks and worker not in self._asking:
            self._asking[worker] = task = asyncio.create_task(self.ask(self._session, worker))
            task.add_done_callback(lambda _: self._asking.pop(worker, None))

    def notify(self) -> None:
        """Wakes every `wait_change`: room has been freed, or a worker has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, timeout_s: float) -> bool:
        """Waits until something changes. Returns False if nothing did within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    # ---- choosing workers ----

    def last_lost_s(self, model: str | None) -> float:
        """Returns when the last decode worker that served `model` ceased to be usable (monotonic), or minus infinity if
        there never was one."""
        times_s = [worker.lost_s for worker in self.serving(model, self.decode)]
        times_s += [left_s for worker, left_s in self._left.items() if worker.serves(model)]
        return max(times_s, default=-math.inf)

    def decode_candidates(self, tried: Container[Worker], model: str | None) -> list[Worker]:
        """Returns the decode workers that serve the model, were not tried and may serve now.

        A try is better than a refusal. So if there is no other, these are workers whose breaker is open, or else
        workers whose only fault is that they have not answered their latest health checks in time.
        """
        left = [worker for worker in self.serving(model, self.decode) if worker not in tried]
        usable = [worker for worker in left if worker.unusable_reason is None]
        now_s = time.monotonic()
        return (
            [worker for worker in usable if worker.breaker.permits(now_s)]
            or usable
            or [worker for worker in left if worker.slow_for_s(now_s) < self._settings.hung_after_s]
        )

    def choose_decode(self, candidates: Sequence[Worker], prompt: PromptEstimate) -> Worker:
        """Chooses one of `candidates` by the policy for decode."""
        return self._policies[Role.DECODE].choose(candidates, prompt)

    @staticmethod
    def serving(model: str | None, workers: Sequence[Worker]) -> list[Worker]:
        """Returns those of `workers` that serve this model, as far as is known; all of them if it is None."""
        return [worker for worker in workers if worker.serves(model)]

    async def learn_models(self) -> None:
        """Asks vLLM servers again which models they serve, because adapters come and go without a restart: at most once
        per `health_every_s`. Never raises."""
        now_s = time.monotonic()
        if self._session is None or now_s < self._models_asked_s + self._settings.health_every_s:
            return
        self._models_asked_s = now_s
        servers = [worker for worker in self.workers if worker.is_vllm and worker.unusable_reason is None]
        await asyncio.gather(*(self._learn_models(self._session, worker) for worker in servers))

    async def _learn_models(self, session: aiohttp.ClientSession, worker: Worker) -> None:
        try:
            models = await ask_which_models(session, worker, aiohttp.ClientTimeout(self._settings.health_timeout_s))
        except (NotAWorker, TimeoutError, aiohttp.ClientError, OSError) as error:
            logger.warning("models not known peer=%s cause=%s", worker.name, reason_of(error))
            return
        if worker.info is not None:
            worker.info = msgspec.structs.replace(worker.info, models=models)

    def longest_request(self, model: str | None) -> int:
        """Returns the most tokens of a prompt and its answer that a decode worker takes which may serve this model; 0
        if one of them does not say."""
        usable = [worker for worker in self.decode if worker.unusable_reason is None]
        longest = max((one.longest_request for one in self.serving(model, usable)), default=math.inf)
        return 0 if longest == math.inf else int(longest)

    def pick_prefill(
        self, decode: Worker | None, tried: set[Worker], prompt: PromptEstimate, model: str | None
    ) -> Worker | None:
        """Chooses, by the policy, a prefill worker that was not tried and fits `decode` (any, if that is None). Returns
        None if there is no such worker, or none that can hold the prompt. If the prompt's length is only estimated, the
        one that can hold most may try."""
        usable = [
            worker
            for worker in self.prefill
            if worker not in tried
            and worker.unavailable_reason() is None
            and (decode is None or self.pair_reason(worker, decode) is None)
        ]
        usable = long_enough(self.serving(model, usable), prompt.num_tokens + 1, exact=prompt.exact)
        return self._policies[Role.PREFILL].choose(usable, prompt) if usable else None

    def has_prefill(self, decode: Worker) -> bool:
        """True if a prefill worker can now serve requests together with this decode worker."""
        return any(w.unavailable_reason() is None and self.pair_reason(w, decode) is None for w in self.prefill)

    def mismatch_reason(self, prefill: Worker, decode: Worker) -> str | None:
        """Returns why the two do not fit, or None if they fit."""
        return self.pairs.mismatch_reason(prefill, decode)

    def pair_reason(self, prefill: Worker, decode: Worker) -> str | None:
        """Returns why the pair gets no request now: `mismatch_reason`, or its open breaker. None if it may get one."""
        return self.mismatch_reason(prefill, decode) or self.pairs.breaker_reason(prefill, decode)

    def no_prefill_reason(self, decode: Worker, model: str | None = None) -> str:
        """Returns why no prefill worker can serve requests for this model together with this decode worker."""
        if not self.prefill:
            return "no prefill worker is configured"
        return "; ".join(self._reason_without(worker, decode, model) for worker in self.prefill)

    def _reason_without(self, prefill: Worker, decode: Worker, model: str | None) -> str:
        reason = prefill.unavailable_reason()
        if reason is None and not prefill.serves(model):
            reason = f"{prefill.name} does not serve the model {model!r}"
        if reason is None and (mismatch := self.mismatch_reason(prefill, decode)) is not None:
            reason = f"{prefill.name} does not fit {decode.name}: {mismatch}"
        reason = reason or self.pairs.breaker_reason(prefill, decode)
        return reason or f"{prefill.name} takes at most {prefill.longest_request:g} tokens"


def long_enough(workers: list[Worker], num_tokens: int, *, exact: bool) -> list[Worker]:
    """Returns those of `workers` that take requests of `num_tokens`. If there is none, and `num_tokens` is only an
    estimate, returns those that take the longest: what is too long is then for them to say."""
    able = [worker for worker in workers if worker.longest_request >= num_tokens]
    if able or exact or not workers:
        return able
    longest = max(worker.longest_request for worker in workers)
    return [worker for worker in workers if worker.longest_request == longest]


def _silence_of(worker: Worker, error: Exception) -> str:
    """Returns what a worker has not done if streams must not wait for it after this error, else an empty string.

    A process that has died ends its streams itself, and one that refuses connections may be finishing its answers. Not
    a vLLM server: it closes its socket after its engine has ended, and leaves open streams silent.
    """
    code = error.errno if isinstance(error, OSError) else None
    if code in _HOST_IS_SILENT:
        return _NO_ANSWER
    is_vllm = worker.info is not None and worker.info.kind == "vllm"
    return _NO_CONNECTION if code == errno.ECONNREFUSED and is_vllm else ""


def reason_of(error: BaseException) -> str:
    """Describes an error of the network in one line."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.strerror or error.os_error}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _set_of_hashes(body: bytes) -> frozenset[bytes]:
    return frozenset({key for key in unpack_hashes(body)})  # noqa: C416  # a loop lets other threads run, a call does not
