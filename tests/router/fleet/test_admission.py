"""Who is admitted while a large prompt finds no room: it has its turn after a while, and small ones still pass."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from kvferry.router.fleet.admission import Admission, Place
from kvferry.router.fleet.failures import FailedAttempts
from kvferry.router.fleet.worker import BlockReservation, Worker
from kvferry.router.fleet.workers import Fleet
from kvferry.router.settings import RouterSettings
from kvferry.settings import Role
from kvferry.web.api_errors import ApiError
from kvferry.web.records import Limits, Room, WorkerInfo
from tests.harness.moved_clock import MovedClock
from tests.harness.until import until_async

TURN_S, WAIT_S = 1000.0, 5000.0
BLOCK = 16


@dataclass
class Asks:
    """A prompt of this many tokens, and its request."""

    num_tokens: int
    exact: bool = True
    model: str | None = None

    def num_cached(self, worker: Worker) -> int:
        return 0

    def served_before(self, worker: Worker) -> bool:
        return False

    def num_needed(self, num_prompt_tokens: int) -> int:
        return num_prompt_tokens + 1


SMALL, LARGE = Asks(30), Asks(1500)
"""2 and 94 blocks."""


class Door:
    """Decode workers of 100 blocks, and their admission."""

    def __init__(self, *free_blocks: int, clock: MovedClock, **settings: float) -> None:
        self.clock = clock
        self.ends: list[asyncio.Event] = []
        given = {"room_turn_s": TURN_S, "room_wait_s": WAIT_S, **settings}
        made = RouterSettings(restart_wait_s=0, **given)  # type: ignore[arg-type]
        self.fleet = Fleet([], [f"http://d{i}" for i in range(len(free_blocks))], made)
        self.admission = Admission(self.fleet, made)
        for worker, free in zip(self.fleet.decode, free_blocks, strict=True):
            worker.down = None
            self.report(worker, free)

    @staticmethod
    def report(worker: Worker, free_blocks: int) -> None:
        worker.info = WorkerInfo(
            engine=worker.url, incarnation="i", role=Role.DECODE, limits=Limits(block_tokens=BLOCK, blocks=100),
            room=Room(free_blocks=free_blocks),
        )  # fmt: skip

    async def admit(self, asks: Asks) -> Place:
        return await self.admission.admit(FailedAttempts(), asks, asks)

    async def wait_until_waiting(self, count: int) -> None:
        await until_async(lambda: self.admission.num_waiting == count)

    @asynccontextmanager
    async def waiting(self, *asks: Asks) -> AsyncIterator[list[asyncio.Task[Place]]]:
        """Yields requests that wait, in this order."""
        tasks = []
        for one in asks:
            tasks.append(asyncio.create_task(self.admit(one)))
            await self.wait_until_waiting(len(tasks))
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def serving(self, count: int) -> AsyncIterator[dict[int, BlockReservation]]:
        """Serves large prompts that wait in this order. Yields the reservations of those that have been admitted."""
        served: dict[int, BlockReservation] = {}
        self.ends = [asyncio.Event() for _ in range(count)]

        async def serve(number: int) -> None:
            place = await self.admit(LARGE)
            with place.taking(LARGE.num_tokens) as served[number]:
                await self.ends[number].wait()

        tasks = []
        for number in range(count):
            tasks.append(asyncio.create_task(serve(number)))
            await self.wait_until_waiting(number + 1)
        try:
            yield served
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def after(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.fleet.notify()


async def ended(task: asyncio.Task[Place]) -> Place:
    """Returns the task's result; fails if it does not end."""
    await until_async(task.done)
    return task.result()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    return MovedClock(monkeypatch)


async def test_small_prompts_pass_a_large_one_until_it_has_its_turn(clock: MovedClock) -> None:
    door = Door(50, clock=clock)
    async with door.waiting(LARGE) as [large]:
        for _ in range(20):
            assert (await door.admit(SMALL)).has_room
        door.after(TURN_S)
        place = await ended(large)
    assert (place.worker, place.has_room) == (door.fleet.decode[0], False)


async def test_a_large_prompt_in_its_turn_reserves_nothing_so_small_ones_still_find_room(clock: MovedClock) -> None:
    door = Door(50, clock=clock, room_turn_s=0)
    with (await door.admit(LARGE)).taking(1500):
        assert door.fleet.decode[0].free_blocks == 50
        small = await door.admit(SMALL)
    assert small.has_room


async def test_one_request_at_a_time_has_its_turn_at_a_worker_the_oldest_first(clock: MovedClock) -> None:
    door = Door(50, clock=clock)
    async with door.serving(3) as served:
        door.after(TURN_S)
        await until_async(lambda: list(served) == [0])
        served[0].began_s = 0.0  # decode has begun to answer
        door.fleet.notify()
        await until_async(lambda: list(served) == [0, 1])
        door.ends[1].set()  # it has failed before that
        await until_async(lambda: served[1].ended)
        door.fleet.notify()
        await until_async(lambda: list(served) == [0, 1, 2])
    assert not door.fleet.decode[0].has_turn


async def test_each_worker_has_a_turn_of_its_own(clock: MovedClock) -> None:
    door = Door(50, 40, clock=clock)
    async with door.serving(3) as served:
        door.after(TURN_S)
        await until_async(lambda: list(served) == [0, 1])
        assert all(worker.has_turn for worker in door.fleet.decode)


async def test_small_prompts_prefer_a_worker_at_which_no_request_waits(clock: MovedClock) -> None:
    door = Door(50, 50, clock=clock, room_turn_s=0)
    large = await door.admit(LARGE)
    with large.taking(1500):
        assert {(await door.admit(SMALL)).worker for _ in range(4)} == set(door.fleet.decode) - {large.worker}


async def test_room_that_comes_before_its_turn_goes_to_the_request_that_waits(clock: MovedClock) -> None:
    door = Door(50, clock=clock)
    async with door.waiting(LARGE) as [large]:
        door.report(door.fleet.decode[0], 94)
        door.fleet.notify()
        assert (await ended(large)).has_room


async def test_a_request_without_a_turn_gets_503_after_its_wait(clock: MovedClock) -> None:
    door = Door(50, clock=clock)
    async with door.serving(1) as served:
        door.after(TURN_S)
        await until_async(lambda: served)
        async with door.waiting(LARGE) as [second]:
            door.after(WAIT_S)
            with pytest.raises(ApiError, match="after 5000 s") as failed:
                await ended(second)
    assert (failed.value.status, failed.value.code) == (503, "overloaded")


async def test_a_client_that_hangs_up_gives_its_turn_to_the_next(clock: MovedClock) -> None:
    door = Door(50, clock=clock)
    async with door.waiting(LARGE, LARGE) as [first, second]:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        door.after(TURN_S)
        assert not (await ended(second)).has_room
