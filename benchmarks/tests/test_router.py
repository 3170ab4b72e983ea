"""`python -m benchmarks.router`: the scripted workers follow their script, and a router that cheats is reported."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.command import main
from benchmarks.router import __main__ as benchmark
from benchmarks.router.alone import Added, Way, turns
from benchmarks.router.fleet import Counters, Script, _Connection, _Fleet
from benchmarks.router.load import Client, Target, closed_loop, open_loop, percentile, request_bytes
from benchmarks.router.routers import ROUTERS, Router, install_rivals
from kvferry.cli.main import ExitCode
from kvferry.errors import ConfigError, FerryError

PULLED = {"remote_block_ids": [[1]], "transfer_mode": "pull"}


@asynccontextmanager
async def workers(script: Script, mode: str = "pull") -> AsyncIterator[tuple[_Fleet, Target, Target]]:
    """The scripted workers, in this process: prefill and decode."""
    fleet = _Fleet()
    fleet.script = script
    loop = asyncio.get_running_loop()
    prefill = await loop.create_server(lambda: _Connection(fleet, "prefill", mode), "127.0.0.1", 0)
    decode = await loop.create_server(lambda: _Connection(fleet, "decode", mode), "127.0.0.1", 0)
    stepping = asyncio.create_task(fleet.step())
    try:
        yield fleet, prefill.sockets[0].getsockname()[:2], decode.sockets[0].getsockname()[:2]
    finally:
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        for server in (prefill, decode):
            server.close()


def a_request(target: Target, params: object = None, *, stream: bool = False) -> bytes:
    body = {"prompt": "x", "stream": stream, "kv_transfer_params": params}
    return request_bytes(target, "/v1/completions", msgspec.json.encode(body))


async def test_push_overlaps_what_pull_does_in_turn() -> None:
    script = Script(prefill_ms=60.0, registration_ms=40.0, chunks=2)
    async with workers(script) as (_, prefill, decode):
        first, second = await Client.connect(prefill), await Client.connect(decode)
        asked = await first.send(a_request(prefill, {"do_remote_decode": True}))
        params = json.loads(asked.body)["kv_transfer_params"]
        answered = await second.send(a_request(decode, params, stream=True))
        assert asked.total_s >= 0.06
        assert answered.first_byte_s >= 0.04
        pushed = second.send(a_request(decode, {"transfer_mode": "push", "transfer_id": "t"}, stream=True))
        await first.send(a_request(prefill, {"transfer_id": "t"}))
        assert 0.06 <= (await pushed).first_byte_s < asked.total_s + answered.first_byte_s
        for client in (first, second):
            client.close()


async def test_streams_step_together_and_are_counted_whole() -> None:
    async with workers(Script(step_ms=1.0, chunks=5)) as (fleet, _, decode):
        clients = [await Client.connect(decode) for _ in range(4)]
        replies = await asyncio.gather(*(client.send(a_request(decode, PULLED, stream=True)) for client in clients))
        assert {reply.body.count(b" tok") for reply in replies} == {5}
        assert all(b"data: [DONE]" in reply.body for reply in replies)
        assert fleet.counters == Counters(pull=4)
        assert not fleet.streams
        for client in clients:
            client.close()


async def test_loops_send_the_stated_load() -> None:
    async with workers(Script()) as (fleet, prefill, decode):
        replies = await closed_loop(decode, [a_request(decode)], 3, 0.05)
        assert fleet.counters.alone == len(replies) > 3
        turns = await open_loop([prefill, decode], [a_request(prefill), a_request(decode, PULLED)], 200.0, 0.1)
        assert (len(turns), fleet.counters.prefill, fleet.counters.pull) == (20, 20, 20)
        assert all(reply.status == 200 and reply.total_s > 0 for reply in turns)


async def test_turns_go_through_every_way_in_a_rotating_order() -> None:
    async with workers(Script(prefill_ms=10.0)) as (fleet, prefill, decode):
        ask, take = (prefill, a_request(prefill)), (decode, a_request(decode, PULLED))
        short, long = Way("short", [take]), Way("long", [ask, take])
        both = Way("both", [ask, take], at_once=True)
        times = await turns([short, long, both], 4)
        assert [len(some) for some in times] == [4, 4, 4]
        assert min(times[1]) >= 0.01
        assert min(times[2]) >= 0.01
        assert percentile(times[0], 0) < 0.01
        assert fleet.counters.prefill == 2 * (fleet.counters.pull - fleet.counters.prefill)
        refused = Way("refused", [(decode, request_bytes(decode, "/nothing", b"{}"))])
        with pytest.raises(FerryError, match="refused answered 404"):
            await turns([refused], 1)


def test_what_is_added_is_the_difference_within_a_turn() -> None:
    """A slow minute of the machine affects both."""
    added = Added([1.1, 5.1, 9.2], [1.0, 5.0, 9.0])
    assert added.p50_ms == pytest.approx(100)
    assert added.p99_ms == pytest.approx(200)


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0
    assert percentile([], 50) != percentile([], 50)


def test_a_router_that_does_not_do_the_work_is_reported() -> None:
    turn: Any = object.__new__(benchmark._Turn)
    turn._name, turn._mode = "cheat", "pull"
    turn._check([200, 200], Counters(), Counters(prefill=2, pull=2))
    for statuses, after in (([200, 200], Counters(prefill=2, alone=2)), ([200, 503], Counters(prefill=2, pull=2))):
        with pytest.raises(FerryError, match="it does not do the work"):
            turn._check(statuses, Counters(), after)


def test_unknown_routers_and_empty_loads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--routers", "nginx"], ["--rounds", "0"], ["--clients", "0"]):
        assert main("router", benchmark.add_arguments, benchmark.run, arguments) == ExitCode.ERROR
    assert "python -m benchmarks.router --help" in capsys.readouterr().err


def test_rivals_are_installed_once_and_a_failure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr("venv.create", lambda folder, **_: folder.mkdir())

    def run(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "no such version")

    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        install_rivals(tmp_path / "rivals")
    assert len(commands) == 1
    assert commands[0][-2:] == ["vllm-router==0.1.17", "smg==1.13.0"]
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "no net"))
    with pytest.raises(FerryError, match="no net"):
        install_rivals(tmp_path / "others")


@pytest.mark.process
def test_one_short_run_of_the_real_thing(capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--rounds", "1", "--seconds", "0.2", "--streams", "8", "--chunks", "4", "--step-ms", "2", "--clients", "4",
             "--turns", "10"]  # fmt: skip
    cores = os.sched_getaffinity(0)
    assert (
        main("router", benchmark.add_arguments, benchmark.run, ["--routers", "kvferry,plain", "--json", *quick])
        == ExitCode.OK
    )
    assert os.sched_getaffinity(0) == cores, "it shares out cores, and gives them back"
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["router"], one["mode"]) for one in lines[:-1]] == [
        ("kvferry", "pull"),
        ("kvferry", "push"),
        ("plain", "pull"),
    ]
    for one in lines[:-1]:
        assert {
            "router",
            "rps",
            "alone_p50_ms",
            "alone_p99_ms",
            "p50_ms",
            "p99_ms",
            "chunks_s",
            "ttft_ms",
            "mode",
        } <= set(one)
        assert one["rps"] > 0
    assert lines[-1]["environment"]["cores"] >= 1
    pull, push = lines[0]["ttft_ms"], lines[1]["ttft_ms"]
    assert pull >= 70 - 1  # prefill's 50 ms, then 20 ms of registration
    assert push >= 50 - 1


def test_every_router_has_a_command_line() -> None:
    for router in ROUTERS:
        argv = router.argv(Path("rivals"), "http://p", "http://d", 7)
        assert "http://p" in argv
        assert "http://d" in argv
        assert "7" in argv
    assert isinstance(ROUTERS[0], Router)
    assert issubclass(ConfigError, FerryError)
