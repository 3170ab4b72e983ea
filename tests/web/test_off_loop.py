"""Work on other threads: in order, bounded, dropped when its caller has gone, and no hindrance to the end."""

import asyncio
import threading

import pytest

from kvferry.errors import Overloaded
from kvferry.web.api_errors import ApiError
from kvferry.web.off_loop import OffLoop
from tests.harness.until import until_async


async def test_calls_run_in_order_and_return_or_raise() -> None:
    threads, order = OffLoop("test", num_threads=1), list[int]()
    calls = [asyncio.create_task(threads.run(lambda i=i: order.append(i) or i)) for i in range(5)]  # type: ignore[misc,func-returns-value]
    assert await asyncio.gather(*calls) == order == [0, 1, 2, 3, 4]
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(threading.get_ident) != threading.get_ident()
    await threads.stop()


async def test_a_call_whose_caller_has_gone_never_runs() -> None:
    threads, began, go_on, ran = OffLoop("test", num_threads=1), threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        began.set()
        go_on.wait(10)

    running = asyncio.create_task(threads.run(first))
    await until_async(began.is_set)
    gone = asyncio.create_task(threads.run(lambda: ran.append("gone")))
    stays = asyncio.create_task(threads.run(lambda: ran.append("stays")))
    await asyncio.sleep(0)
    gone.cancel()
    running.cancel()  # it runs on, and its result is dropped
    await asyncio.gather(gone, running, return_exceptions=True)
    go_on.set()
    await stays
    assert ran == ["stays"]
    await threads.stop()


async def test_too_many_calls_are_refused_and_those_that_were_cancelled_do_not_count() -> None:
    threads, go_on = OffLoop("test", num_threads=1, max_waiting=2), threading.Event()
    began = threading.Event()
    running = asyncio.create_task(threads.run(lambda: began.set() or go_on.wait(10)))  # type: ignore[func-returns-value]
    await until_async(began.is_set)
    waiting = [asyncio.create_task(threads.run(lambda: 7)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 requests wait to be read"):
        await threads.run(lambda: 8)
    waiting[0].cancel()
    await asyncio.sleep(0)
    third = asyncio.create_task(threads.run(lambda: 9))
    await asyncio.sleep(0)
    go_on.set()
    assert (await running, await waiting[1], await third) == (True, 7, 9)
    await threads.stop()


@pytest.mark.leaves("the thread that is left behind runs until the end of the test")
async def test_stopping_does_not_wait_for_a_call_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.web.off_loop._JOIN_S", 0.01)
    threads, began, go_on = OffLoop("test", num_threads=1), threading.Event(), threading.Event()
    running = asyncio.create_task(threads.run(lambda: began.set() or go_on.wait(60)))  # type: ignore[func-returns-value]
    waiting = asyncio.create_task(threads.run(lambda: 7))
    await until_async(began.is_set)
    await threads.stop()
    with pytest.raises(ApiError, match="stopping"):
        await waiting
    with pytest.raises(ApiError, match="stopping"):
        await threads.run(lambda: 8)
    assert not running.done()
    go_on.set()
    assert await running
