"""The cores on which a CPU worker's transfer threads run."""

import os
import threading
from collections.abc import Iterator

import pytest

from kvferry.engines.vllm.worker_side.cpu_affinity import on_every_core


@pytest.fixture
def bound() -> Iterator[set[int]]:
    """Binds this thread to one core, as OpenMP does with a worker's; returns the cores that it could use before."""
    free = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(free)})
    yield free
    os.sched_setaffinity(0, free)


def cores_of_a_thread() -> set[int]:
    seen: list[set[int]] = []
    thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return seen[0]


def test_threads_started_inside_are_free_and_the_caller_stays_bound(bound: set[int]) -> None:
    assert cores_of_a_thread() == {min(bound)}
    with on_every_core():
        assert cores_of_a_thread() >= os.sched_getaffinity(os.getppid())
    assert os.sched_getaffinity(0) == {min(bound)}


def test_nothing_changes_if_cores_cannot_be_chosen(bound: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int, _cores: object) -> None:
        raise PermissionError("not here")

    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_setaffinity", refuse)
        with on_every_core():
            assert cores_of_a_thread() == {min(bound)}
