"""R39 to R41: an engine fetches the KV of a prefix from another one that holds it. Whole workers in this process."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.engines.mini.api import FinishReason, GenerateRequest, Output
from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.worker import Worker, WorkerSettings, build_worker
from kvferry.ids import RequestId
from kvferry.settings import (
    FerrySettings,
    FetchSettings,
    LeaseSettings,
    Role,
    SideChannelSettings,
    TransferMode,
    TransferSettings,
    Verify,
)
from kvferry.stats import PromptAccount
from kvferry.wire.params import HandoffParams, Source
from tests.e2e.matrix import FAMILIES
from tests.engines.mini.conftest import ask, prompt_of, tokens_of
from tests.harness.tiny_model import make_tiny_model
from tests.harness.until import until

pytestmark = pytest.mark.engine

MODES = pytest.mark.parametrize("mode", list(TransferMode))
KINDS = ("llama", "gemma3", "mla", "mamba")
"""Families with full attention, with windows, with MLA, and with recurrent states."""

MakeWorker = Callable[..., Worker]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory of a tiny model of each family."""
    place = tmp_path_factory.mktemp("fetch")
    return {name: make_tiny_model(place / name, **FAMILIES[name]) for name in KINDS}


@pytest.fixture
def make_worker(models: dict[str, Path]) -> Iterator[MakeWorker]:
    """Makes workers, and checks at the end that none has lost a block."""
    workers: list[Worker] = []

    def make(
        family: str = "llama",
        mode: TransferMode = TransferMode.PULL,
        role: Role = Role.BOTH,
        fetch: FetchSettings | None = None,
        protocol_max: int | None = None,
        **engine: Any,
    ) -> Worker:
        settings = EngineSettings(
            **{"model": str(models[family]), "dtype": "float32", "num_blocks": 64, "max_batch_tokens": 64, **engine}
        )
        transfer = TransferSettings(mode=mode, transport="memory", staging_bytes=0, verify=Verify.ALL)
        lease = LeaseSettings(ttl_s=2.0, renew_every_s=0.3, quarantine_s=0.2)
        side_channel = SideChannelSettings(protocol_max=protocol_max)
        ferry = FerrySettings(transfer=transfer, lease=lease, side_channel=side_channel, fetch=fetch or FetchSettings())
        workers.append(build_worker(WorkerSettings(engine=settings, ferry=ferry, role=role)))
        return workers[-1]

    yield make
    settle(*[worker.engine for worker in workers])
    for worker in workers:
        worker.engine.check()
        assert worker.engine.blocks.num_held == 0
        assert worker.engine.scheduler.holder.num_blocks == 0
        worker.close()


def settle(*engines: Engine) -> None:
    """Steps all engines until none has anything to do."""
    until(lambda: not any(engine.has_work() for engine in engines), meanwhile=lambda: step_all(*engines), within_s=20)


def step_all(*engines: Engine) -> list[Output]:
    return [output for engine in engines for output in engine.step()]


def answer(engine: Engine, spec: GenerateRequest, *others: Engine) -> list[Output]:
    """Returns all outputs of a request, while the other engines run, too."""
    engine.add(spec)
    outputs: list[Output] = []

    def ended() -> bool:
        outputs.extend(output for output in engine.step() if output.request_id == spec.request_id)
        for other in others:
            other.step()
        return bool(outputs) and outputs[-1].finish_reason is not None

    until(ended, within_s=20)
    return outputs


def from_(*workers: Worker, **changes: Any) -> HandoffParams:
    """The parameters of a request that may fetch from these."""
    return HandoffParams(
        sources=[
            Source(engine_id=worker.identity.engine, host=worker.identity.host, port=worker.identity.port, **changes)
            for worker in workers
        ]
    )


@MODES
@pytest.mark.parametrize("roles", [("decode", "prefill"), ("prefill", "prefill"), ("decode", "decode")])
@pytest.mark.parametrize("family", KINDS)
def test_a_prefix_is_fetched_and_changes_no_token(
    make_worker: MakeWorker, family: str, roles: tuple[str, str], mode: TransferMode
) -> None:
    holder, fetcher = (make_worker(family, mode, Role(role)) for role in roles)
    first = prompt_of(70)
    said = tokens_of(answer(holder.engine, ask("turn 1", first, max_tokens=30)))
    prompt = [*first, *said, *prompt_of(20, seed=9)]
    expected = tokens_of(answer(make_worker(family).engine, ask("alone", prompt)))
    outputs = answer(fetcher.engine, ask("turn 2", prompt, from_(holder)), holder.engine)
    assert tokens_of(outputs) == expected
    account = outputs[-1].account
    assert account is not None
    assert (account.reason, account.handed_over, account.cached) == ("", 0, 0)
    assert account.fetched >= 80  # whole blocks of the 99 tokens that the holder has computed
    assert account.fetched + account.recomputed == len(prompt)


def account_of(outputs: list[Output]) -> PromptAccount:
    account = outputs[-1].account
    assert account is not None
    return account


@MODES
def test_prefill_fetches_what_decode_holds_and_hands_over_only_the_rest(
    make_worker: MakeWorker, mode: TransferMode
) -> None:  # R40
    prefill, decode = make_worker(mode=mode, role=Role.PREFILL), make_worker(mode=mode, role=Role.DECODE)
    first = prompt_of(64)
    said = tokens_of(answer(decode.engine, ask("turn 1", first, max_tokens=33)))
    prompt = [*first, *said, *prompt_of(20, seed=9)]
    expected = tokens_of(answer(make_worker().engine, ask("alone", prompt)))
    asks = HandoffParams(do_remote_decode=True, transfer_id="t", sources=from_(decode).sources)
    takes = HandoffParams(
        do_remote_prefill=True,
        transfer_id="t",
        transfer_mode=mode,
        remote_engine_id=prefill.identity.engine,
        remote_host=prefill.identity.host,
        remote_port=prefill.identity.port,
    )
    on_prefill: list[Output] = []
    on_decode: list[Output] = []
    prefill.engine.add(ask("p", prompt, asks, max_tokens=1))
    if mode is TransferMode.PUSH:
        decode.engine.add(ask("d", prompt, takes))

    def ended() -> bool:
        for output in prefill.engine.step():
            on_prefill.append(output)
            if output.handoff is not None and mode is TransferMode.PULL:
                decode.engine.add(ask("d", prompt, output.handoff))
        on_decode.extend(decode.engine.step())
        return bool(on_decode) and on_decode[-1].finish_reason is not None

    until(ended, within_s=20)
    assert tokens_of(on_decode) == expected
    ours, theirs = account_of(on_prefill), account_of(on_decode)
    assert (ours.fetched, ours.source, ours.recomputed) == (96, decode.identity.engine, 21)
    assert (theirs.cached, theirs.handed_over, theirs.recomputed) == (96, 21, 0)


def turn(holder: Worker, fetcher: Worker, handoff: HandoffParams, salts: tuple[str, str] = ("", "")) -> PromptAccount:
    """Lets the holder answer a prompt, and the fetcher the same prompt with more. Returns the latter's account."""
    first = prompt_of(64)
    answer(holder.engine, replace(ask("turn 1", first), salt=salts[0]))
    spec = replace(ask("turn 2", [*first, *prompt_of(20, seed=9)], handoff), salt=salts[1])
    outputs = answer(fetcher.engine, spec, holder.engine)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    account = account_of(outputs)
    assert account.fetched + account.cached + account.recomputed == 84
    return account


def test_only_a_request_under_the_same_salt_gets_it(make_worker: MakeWorker) -> None:  # R38
    holder, fetcher = make_worker(), make_worker(prefix_caching=False)
    assert turn(holder, fetcher, from_(holder), ("a", "b")).fetched == 0
    assert turn(holder, fetcher, from_(holder), ("a", "")).fetched == 0
    assert turn(holder, fetcher, from_(holder), ("a", "a")).fetched == 64


def test_a_holder_gives_no_more_than_its_share(make_worker: MakeWorker) -> None:  # I9
    nothing, little = make_worker(fetch=FetchSettings(share=0.0)), make_worker(fetch=FetchSettings(share=0.04))
    assert "gives nothing of its cache" in turn(nothing, make_worker(), from_(nothing)).reason
    assert "these would be 4 more, and 2 may be kept" in turn(little, make_worker(), from_(little)).reason


def test_the_next_source_is_asked_if_one_has_nothing(make_worker: MakeWorker) -> None:  # R40
    empty, old, holder, fetcher = make_worker(), make_worker(protocol_max=4), make_worker(), make_worker()
    first = prompt_of(64)
    answer(holder.engine, ask("turn 1", first))
    spec = ask("turn 2", [*first, *prompt_of(20, seed=9)], from_(empty, old, holder))
    account = account_of(answer(fetcher.engine, spec, empty.engine, holder.engine))
    assert (account.fetched, account.source, account.reason) == (64, holder.identity.engine, "")


def test_an_older_peer_is_never_asked_and_the_reason_is_shown(make_worker: MakeWorker) -> None:  # R39
    old, fetcher = make_worker(protocol_max=4), make_worker()
    assert "it speaks protocol version 4, and is asked from version 5 on" in turn(old, fetcher, from_(old)).reason


def test_a_holder_that_has_restarted_has_nothing(make_worker: MakeWorker) -> None:  # R39
    holder, fetcher = make_worker(), make_worker()
    assert "has restarted" in turn(holder, fetcher, from_(holder, incarnation="another")).reason


def test_a_source_that_is_not_believed_to_hold_more_is_not_asked(make_worker: MakeWorker) -> None:  # R40
    holder, fetcher = make_worker(), make_worker()
    answer(fetcher.engine, ask("before", prompt_of(64)))
    account = turn(holder, fetcher, from_(holder, num_tokens=64))
    assert (account.cached, account.fetched, account.reason) == (64, 0, "")


def test_a_request_that_ends_while_it_asks_pins_nothing(make_worker: MakeWorker) -> None:  # I9
    holder, fetcher = make_worker(), make_worker()
    first = prompt_of(64)
    answer(holder.engine, ask("turn 1", first))
    for steps in (1, 2, 3, 5, 8):  # the fixture checks that the holder keeps nothing
        fetcher.engine.add(ask(f"turn {steps}", [*first, *prompt_of(20, seed=steps)], from_(holder)))
        for _ in range(steps):
            step_all(fetcher.engine, holder.engine)
        fetcher.engine.abort(RequestId(f"turn {steps}"))
        step_all(fetcher.engine)


def test_a_holder_takes_its_blocks_back_when_its_own_request_has_no_room(make_worker: MakeWorker) -> None:  # R39, I9
    holder, fetcher = make_worker(num_blocks=17, fetch=FetchSettings(share=1.0)), make_worker()
    first = prompt_of(128)
    answer(holder.engine, ask("turn 1", first, max_tokens=1))
    fetcher.engine.add(ask("turn 2", [*first, *prompt_of(20, seed=9)], from_(holder)))

    def pinned() -> bool:
        step_all(fetcher.engine, holder.engine)
        return holder.engine.scheduler.holder.num_blocks == 8

    until(pinned, within_s=20)  # from here on the fetcher does not step, and takes nothing
    (*_, last) = answer(holder.engine, ask("own", prompt_of(200, seed=5), max_tokens=1))
    assert last.finish_reason is FinishReason.LENGTH
    until(lambda: any(output.finish_reason for output in step_all(fetcher.engine, holder.engine)), within_s=20)
