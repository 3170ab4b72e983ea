"""`kvferry up` and `kvferry demo` with real workers of a tiny model, over real NIXL."""

import itertools
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from kvferry.cli.main import ExitCode, main
from tests.cli.conftest import Start
from tests.cli.support.test_supervisor import exists
from tests.harness.until import until, until_async

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(180)]

WORKER = ("--dtype", "float32", "--num-blocks", "256", "--threads", "1", "--verify", "all")
PROMPT = "a ferry carries people across a river, and the other bank has a bakery"


class Fleet:
    """A running `kvferry up`."""

    def __init__(self, start: Start, model: Path, tmp_path: Path, *argv: str, **env: str) -> None:
        self.ready_file = tmp_path / "ready.json"
        ready = ("--ready-file", str(self.ready_file))
        self.process = start("up", str(model), "--port", "0", *ready, *WORKER, *argv, **env)
        until(lambda: self.ready_file.exists() or self.process.poll() is not None, within_s=120)
        assert self.process.poll() is None, self.process.communicate()
        self.url = str(json.loads(self.ready_file.read_text())["url"])

    def pids(self) -> dict[str, int]:
        """Returns the children by name, from their command lines."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
                argv = (path / "cmdline").read_text().split("\0")
            except (OSError, IndexError):
                continue
            if parent == self.process.pid and "kvferry" in argv:
                found[argv[argv.index("--engine-id") + 1] if "--engine-id" in argv else "router"] = int(path.name)
        return found

    @asynccontextmanager
    async def client(self) -> AsyncIterator[openai.AsyncOpenAI]:
        """Returns the official client for the router."""
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
            yield made

    async def complete(self, prompt: str = PROMPT, **more: Any) -> Any:
        """Returns the text of a greedy completion, and how it was served."""
        async with self.client() as client:
            params: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}, **more}
            return await client.completions.create(model="tiny-llama", prompt=prompt, **params)

    def end(self, number: signal.Signals, code: ExitCode) -> str:
        """Sends a signal, checks that nothing is left, and returns the output."""
        pids = self.pids()
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=600)
        assert self.process.returncode == code, err
        assert not [name for name, pid in pids.items() if exists(pid)]
        return err


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_fleet_hands_over_and_one_ctrl_c_ends_it(  # R12, R16, R36
    mode: str, start: Start, tiny: Path, tmp_path: Path
) -> None:
    fleet = Fleet(start, tiny, tmp_path, "--transfer-mode", mode)
    assert set(fleet.pids()) == {"prefill-0", "decode-0", "router"}
    alone = await fleet.complete(max_tokens=1)
    answer = await fleet.complete()
    served = answer.kvferry
    num_prompt = answer.usage.prompt_tokens
    assert (served["mode"], served["prefill"], served["decode"]) == (mode, "prefill-0", "decode-0")
    assert (served["handed_over"], served["recomputed"], served["why"]) == (num_prompt, 0, "")
    assert served["bytes"] >= num_prompt * 3 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, size, fp32
    assert answer.choices[0].text.startswith(alone.choices[0].text)
    again = await fleet.complete()
    assert again.choices[0].text == answer.choices[0].text
    assert again.kvferry["cached"] > 0  # R30
    assert again.kvferry["cached"] + again.kvferry["handed_over"] + again.kvferry["recomputed"] == num_prompt
    several = await fleet.complete(n=3, logprobs=2)
    assert {choice.text for choice in several.choices} == {answer.choices[0].text}
    assert len(several.choices[0].logprobs.tokens) == 12
    async with fleet.client() as client:
        stream = await client.chat.completions.create(
            model="tiny-llama", messages=[{"role": "user", "content": PROMPT}], max_tokens=6, temperature=0, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].kvferry["handed_over"] > 0  # type: ignore[attr-defined]
    err = fleet.end(signal.SIGINT, ExitCode.OK)
    assert "[prefill-0]" not in err  # quiet, unless asked
    assert f"dashboard          {fleet.url}/ui" in err
    assert err.count(f"{fleet.url}/ui") == 1
    assert "all processes have ended" in err


async def test_clients_and_workers_that_go_away_leave_nothing_open(
    start: Start, tiny: Path, tmp_path: Path
) -> None:  # R28, R29
    fleet = Fleet(start, tiny, tmp_path, "--restart", "--lease-ttl", "2", "--lease-renew-every", "0.5")
    async with aiohttp.ClientSession() as session:
        view = await (await session.get(f"{fleet.url}/v1/kvferry")).json()
        prefill, decode = (worker["url"] for worker in view["workers"])

        async with fleet.client() as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(model="tiny-llama", prompt="x " * 5000)
            assert refused.value.code == "context_length_exceeded"

            stream = await client.completions.create(model="tiny-llama", prompt=PROMPT, max_tokens=1500, stream=True)
            async for _ in stream:
                break
            await stream.close()
        for url in (prefill, decode):
            await _until_idle(session, url)

        # Prefill dies after its answer: the parameters name blocks that no process holds any more.
        body: dict[str, Any] = {"prompt": PROMPT + " at noon", "max_tokens": 8, "temperature": 0}
        ticket = {"do_remote_decode": True, "transfer_id": "t-after"}
        asked = await session.post(f"{prefill}/v1/completions", json={**body, "kv_transfer_params": ticket})
        params = (await asked.json())["kv_transfer_params"]
        os.kill(fleet.pids()["prefill-0"], signal.SIGKILL)
        orphan = await session.post(f"{decode}/v1/completions", json={**body, "kv_transfer_params": params})
        answer = await orphan.json()
        assert orphan.status == 200, answer
        assert answer["kvferry"]["handed_over"] == 0
        assert answer["kvferry"]["recomputed"] > 0
        assert answer["kvferry"]["why"]
        alone = await session.post(f"{decode}/v1/completions", json=body)
        assert (await alone.json())["choices"][0]["text"] == answer["choices"][0]["text"]
        await _until_idle(session, decode)
    fleet.end(signal.SIGINT, ExitCode.OK)


async def _until_idle(session: aiohttp.ClientSession, url: str) -> None:
    """Waits until no request runs or waits, and no block is held for a hand-off."""
    wanted = {"kvferry_open_sequences", "kvferry_engine_running", "kvferry_engine_held_blocks"}

    async def idle() -> bool:
        text = await (await session.get(f"{url}/metrics")).text()
        values = dict(line.split(" ") for line in text.splitlines() if not line.startswith("#"))
        return all(float(values[name]) == 0 for name in wanted)

    await until_async(idle, "the worker is idle", within_s=60.0, every_s=0.05)


async def test_a_worker_that_dies_ends_the_fleet_and_is_named(start: Start, tiny: Path, tmp_path: Path) -> None:
    fleet = Fleet(start, tiny, tmp_path)
    pids = fleet.pids()
    os.kill(pids["decode-0"], signal.SIGKILL)
    _, err = fleet.process.communicate(timeout=600)
    assert fleet.process.returncode == ExitCode.ERROR
    assert f"decode-0 (pid {pids['decode-0']}) was killed by SIGKILL" in err
    assert not any(map(exists, pids.values()))


async def test_the_other_workers_go_on_while_one_drains(start: Start, tiny: Path, tmp_path: Path) -> None:
    fleet = Fleet(start, tiny, tmp_path)
    os.kill(fleet.pids()["prefill-0"], signal.SIGTERM)
    until(lambda: "prefill-0" not in fleet.pids(), within_s=60)
    answer = await fleet.complete()
    assert answer.kvferry["handed_over"] == 0
    fleet.end(signal.SIGINT, ExitCode.OK)


async def test_restart_brings_a_killed_worker_back_and_decode_serves_alone_until_then(
    start: Start, tiny: Path, tmp_path: Path
) -> None:
    fleet = Fleet(start, tiny, tmp_path, "--restart")
    first = await fleet.complete()
    assert first.kvferry["handed_over"] > 0
    killed = fleet.pids()["prefill-0"]
    os.kill(killed, signal.SIGKILL)
    until(lambda: not exists(killed), within_s=20)
    alone = await fleet.complete(prompt=PROMPT + " and a mill")
    assert alone.kvferry["handed_over"] == 0
    assert "prefill" in alone.kvferry["why"]
    numbers = itertools.count(1)  # every prompt is new, so nothing comes from a cache

    async def handed_over() -> bool:
        answer = await fleet.complete(prompt=f"{next(numbers)} {PROMPT}")
        assert answer.choices[0].text
        return bool(answer.kvferry["handed_over"] > 0)

    await until_async(handed_over, "a prompt is handed over again", within_s=90.0, every_s=0.2)
    assert fleet.pids()["prefill-0"] != killed
    fleet.end(signal.SIGTERM, ExitCode.OK)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--decode", "0"], "kvferry up: --decode 0: give 1 or more"),
        (["--prefill", "-1"], "kvferry up: --prefill -1: give 0 or more"),
        ([], "kvferry up: there is no model at 'no-such-model'"),
    ],
)
def test_what_no_worker_can_start_with_is_reported_once(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "no-such-model", "--port", "0", *argv]) == ExitCode.ERROR
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert err.count("\n") == 1


_END_ENGINE = """
import os, sys
from pathlib import Path

if "--engine-id" in sys.argv:
    from kvferry.engines.mini.server.engine_thread import EngineThread

    begin = EngineThread.__init__
    order = Path(os.environ["END_ENGINE_IN"]) / sys.argv[sys.argv.index("--engine-id") + 1]

    def beginning(self, engine, **more):
        step = engine.step

        def stepping():
            if order.exists():
                order.unlink()
                raise RuntimeError("injected: the engine is broken")
            return step()

        engine.step = stepping
        begin(self, engine, **more)

    EngineThread.__init__ = beginning
"""


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_restart_replaces_a_worker_whose_engine_has_ended(
    name: str, start: Start, tiny: Path, tmp_path: Path
) -> None:
    """The process lives on when its engine ends, so it ends itself (exit status 1), and is started again."""
    orders, injected = tmp_path / "orders", tmp_path / "injected"
    for directory in (orders, injected):
        directory.mkdir()
    (injected / "sitecustomize.py").write_text(_END_ENGINE)
    path = os.pathsep.join([str(injected), *filter(None, [os.environ.get("PYTHONPATH")])])
    fleet = Fleet(start, tiny, tmp_path, "--restart", PYTHONPATH=path, END_ENGINE_IN=str(orders))
    assert (await fleet.complete()).kvferry["handed_over"] > 0
    ended = fleet.pids()[name]
    (orders / name).touch()
    numbers = itertools.count(1)  # every prompt is new, so nothing comes from a cache

    async def handed_over() -> bool:
        try:
            answer = await fleet.complete(prompt=f"{next(numbers)} {PROMPT}")
        except openai.APIError:
            return False  # the request in which the engine ended, or no decode worker is there yet
        return bool(answer.kvferry["handed_over"] > 0) and fleet.pids().get(name) not in (None, ended)

    await until_async(handed_over, "the worker that was started again serves", within_s=120.0, every_s=0.2)
    assert not (orders / name).exists(), "the engine has ended"
    err = fleet.end(signal.SIGTERM, ExitCode.OK)
    assert f"{name} (pid {ended}) ended with exit status 1" in err


def test_up_names_the_worker_that_cannot_start(start: Start, tmp_path: Path) -> None:
    process = start("up", str(tmp_path), "--port", "0")
    _, err = process.communicate(timeout=600)
    assert process.returncode == ExitCode.ERROR
    assert str(tmp_path) in err.splitlines()[-1] or "was not ready yet" in err


def test_demo_prints_one_json_object(start: Start, tiny: Path) -> None:
    process = start("demo", "--model", str(tiny), "--json", "--max-tokens", "8", *WORKER)
    out, err = process.communicate(timeout=600)
    assert process.returncode == ExitCode.OK, err
    result = json.loads(out)
    needed = {
        "model", "mode", "prompt_tokens", "handed_over", "cached", "recomputed", "bytes", "transfer_ms", "ttft_ms",
        "tokens_equal",
    }  # fmt: skip
    assert needed <= set(result)
    assert result["tokens_equal"] is True
    assert result["handed_over"] == result["prompt_tokens"] > 0
    assert result["transfer_ms"] > 0


def test_demo_prints_a_summary_for_people(start: Start, tiny: Path) -> None:
    process = start("demo", "--model", str(tiny), "--max-tokens", "8", "--transfer-mode", "push", *WORKER)
    out, err = process.communicate(timeout=600)
    assert process.returncode == ExitCode.OK, err
    for part in ("handed over", "the hand-off: prefill-0 -> decode-0, push", "tokens equal      yes"):
        assert part in out
    assert "\x1b[" not in out + err  # plain when piped
