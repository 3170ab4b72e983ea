"""Child processes are started, distinguished, watched and ended; none is left, whatever happens to the parent."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from kvferry.cli.support.supervisor import Child, ChildEnded, ChildSpec, Supervisor
from kvferry.errors import FerryError
from tests.harness.scripted_worker import STREAM, a_decode, decode_script
from tests.harness.until import until, until_async
from tests.router.test_dispatch import BODY, post
from tests.router.test_draining import held

pytestmark = pytest.mark.process

ROUTE = ("route", "--decode", "http://127.0.0.1:1", "--port", "0")
Lines = list[tuple[str, str]]


@pytest.fixture
def lines() -> Lines:
    return []


def supervisor(lines: Lines) -> Supervisor:
    return Supervisor(lambda name, line: lines.append((name, line)))


def exists(pid: int) -> bool:
    """Returns whether this is a process and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def test_children_get_their_own_ports_and_end_with_the_context(lines: Lines) -> None:
    async with supervisor(lines) as boss:
        children = [await boss.start(ChildSpec(f"router-{i}", ROUTE)) for i in range(2)]
        await boss.wait_ready(children, 30)
        assert len({child.url for child in children}) == 2
        async with aiohttp.ClientSession() as session:
            for child in children:
                assert (await session.get(f"{child.url}/health")).status == 503
        pids = [child.process.pid for child in children]
        directories = [child.ready_file.parent for child in children]
    assert not any(map(exists, pids))
    assert [child.process.returncode for child in children] == [0, 0]
    assert not any(directory.exists() for directory in directories)
    assert {name for name, _ in lines} == {"router-0", "router-1"}
    assert any("routing url=" in line for _, line in lines)


async def test_a_child_that_cannot_start_gives_the_reason(lines: Lines) -> None:
    async with supervisor(lines) as boss:
        child = await boss.start(ChildSpec("router", ("route", "--port", "0", "--decode", "ftp://d")))
        with pytest.raises(ChildEnded, match=r"router \(pid \d+\) ended with exit status 1: .*'ftp://d' must begin"):
            await boss.wait_ready([child], 30)


async def test_a_child_that_never_becomes_ready_is_given_up(lines: Lines) -> None:
    async with supervisor(lines) as boss:
        child = await boss.start(ChildSpec("router", ROUTE))
        with pytest.raises(FerryError, match=r"router did not become ready in 0.01 s"):
            await boss.wait_ready([child], 0.01)
        child_pid = child.process.pid
    assert not exists(child_pid)


async def test_the_death_of_a_child_is_reported(lines: Lines) -> None:
    async with supervisor(lines) as boss:
        children = [await boss.start(ChildSpec(f"router-{i}", ROUTE)) for i in range(2)]
        await boss.wait_ready(children, 30)
        children[1].process.kill()
        dead = await boss.wait_ended()
        assert dead is children[1]
        assert "router-1" in dead.how_it_ended()
        assert "was killed by SIGKILL" in dead.how_it_ended()
        assert boss.children == [children[0]]


async def test_a_child_that_does_not_end_is_killed_at_the_second_request(lines: Lines) -> None:
    async with supervisor(lines) as boss:
        child = await boss.start(ChildSpec("router", ROUTE))
        await boss.wait_ready([child], 30)
        os.kill(child.process.pid, signal.SIGSTOP)  # cannot answer SIGTERM
        boss.hurry()
    assert child.process.returncode == -signal.SIGKILL


async def test_a_child_that_drains_is_ended_first_and_has_its_time(lines: Lines) -> None:
    """As the router of `kvferry up`: the open stream needs the workers, which must not be ended before it."""
    go_on = asyncio.Event()
    worker = a_decode(script=held(go_on, decode_script, STREAM[:34]))
    await worker.start()
    spec = ChildSpec("router", ("route", "--decode", worker.url, "--port", "0"), 30.0)
    async with supervisor(lines) as boss:
        router, other = [await boss.start(one) for one in (spec, ChildSpec("other", ROUTE))]
        await boss.wait_ready([router, other], 30)
        asking = asyncio.create_task(post(router.url, {**BODY, "stream": True}))
        await until_async(lambda: bool(worker.asked))
        ending = asyncio.create_task(boss.stop())
        await until_async(lambda: any("draining cause=SIGTERM" in line for _, line in lines))
        assert other.process.returncode is None
        go_on.set()
        assert (await asking)[1] == STREAM
        await ending
    assert [child.process.returncode for child in (router, other)] == [0, 0]
    ended = [name for name, line in lines if "stopping url=" in line]
    assert ended == ["router", "other"]
    await worker.stop()


PARENT = """
import asyncio, sys
from kvferry.cli.support.supervisor import ChildSpec, Supervisor

async def main():
    async with Supervisor(lambda name, line: None) as boss:
        child = await boss.start(ChildSpec("router", {route!r}))
        await boss.wait_ready([child], 30)
        print(child.process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(route=ROUTE)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # pytest removes what it can no longer clean up
    )
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    assert exists(child_pid)
    parent.kill()
    parent.communicate()
    until(lambda: not exists(child_pid), within_s=20)


def test_a_child_whose_parent_is_already_gone_does_not_start() -> None:
    argv = [sys.executable, "-m", "kvferry", *ROUTE]
    env = {**os.environ, "KVFERRY_SUPERVISOR_PID": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert "the supervisor '1' of this process is gone" in done.stderr


async def test_leaving_by_cancellation_ends_the_children_too(lines: Lines) -> None:
    started: list[Child] = []

    async def run() -> None:
        async with supervisor(lines) as boss:
            started.append(await boss.start(ChildSpec("router", ROUTE)))
            await boss.wait_ready(started, 30)
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await until_async(lambda: started and started[0].ready, "the router is ready", within_s=30.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not exists(started[0].process.pid)
