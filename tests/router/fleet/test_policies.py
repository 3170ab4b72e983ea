"""Which of several workers is chosen."""

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from kvferry.router.fleet.policies import make_policy
from kvferry.router.fleet.worker import Worker
from kvferry.router.settings import PolicyName, RouterSettings
from kvferry.settings import Role
from kvferry.web.records import Limits, Load, Room, WorkerInfo


@dataclass
class Wants:
    num_tokens: int = 100
    cached: dict[str, int] = field(default_factory=dict)
    exact: bool = True
    before: str = ""

    def served_before(self, worker: Worker) -> bool:
        return worker.url == self.before

    def num_cached(self, worker: Worker) -> int:
        return self.cached.get(worker.url, 0)


def workers(count: int = 3) -> list[Worker]:
    return [Worker(f"http://w{i}", Role.DECODE, RouterSettings()) for i in range(count)]


def an_info(**more: object) -> WorkerInfo:
    return msgspec.structs.replace(WorkerInfo(engine="e", incarnation="i", role=Role.DECODE), **more)


@pytest.mark.parametrize("name", list(PolicyName))
def test_equal_workers_get_equal_shares(name: PolicyName) -> None:
    policy, all_of_them = make_policy(name, random.Random(1)), workers()
    counts = dict.fromkeys((w.url for w in all_of_them), 0)
    for _ in range(300):
        counts[policy.choose(all_of_them, Wants()).url] += 1
    assert min(counts.values()) >= (60 if name is PolicyName.POWER_OF_TWO else 100)


@pytest.mark.parametrize("name", [PolicyName.LEAST_LOADED, PolicyName.POWER_OF_TWO, PolicyName.PREFIX_AWARE])
def test_a_loaded_worker_gets_less(name: PolicyName) -> None:
    policy, all_of_them = make_policy(name, random.Random(1)), workers(2)
    all_of_them[0].num_open = 50
    chosen = [policy.choose(all_of_them, Wants()).url for _ in range(20)]
    assert set(chosen) == {"http://w1"}


TIED = [PolicyName.LEAST_LOADED, PolicyName.POWER_OF_TWO, PolicyName.PREFIX_AWARE]


@pytest.mark.parametrize("name", TIED)
def test_a_tie_goes_to_the_worker_that_served_the_turn_before(name: PolicyName) -> None:
    policy, two = make_policy(name, random.Random(1)), workers(2)
    assert {policy.choose(two, Wants(before="http://w1")).url for _ in range(10)} == {"http://w1"}
    two[1].num_open = 1
    assert policy.choose(two, Wants(before="http://w1")).url == "http://w0"


@pytest.mark.parametrize("name", TIED)
def test_a_tie_of_a_new_conversation_goes_to_each_in_turn(name: PolicyName) -> None:
    policy, two = make_policy(name, random.Random(1)), workers(2)
    assert [policy.choose(two, Wants()).url for _ in range(4)] == ["http://w0", "http://w1"] * 2


def test_round_robin_does_not_look_at_load() -> None:
    policy, all_of_them = make_policy(PolicyName.ROUND_ROBIN), workers(2)
    all_of_them[0].num_open = 50
    assert len({policy.choose(all_of_them, Wants()).url for _ in range(2)}) == 2


def test_load_includes_the_requests_of_other_routers() -> None:
    [worker] = workers(1)
    worker.num_open = 2
    worker.reported(1.0)
    worker.info = an_info(load=Load(open_requests=7))
    assert worker.load == 7
    worker.num_open = 0  # ours have ended; as far as we know, the other 5 are still there
    assert worker.load == 5


def test_a_cached_prefix_attracts_until_the_queue_costs_more() -> None:
    policy, all_of_them = make_policy(PolicyName.PREFIX_AWARE), workers()
    wants = Wants(1000, {"http://w1": 900})
    for _ in range(50):
        assert policy.choose(all_of_them, wants).url == "http://w1"
    all_of_them[1].num_open = 3  # three prompts of about a thousand tokens wait there
    assert policy.choose(all_of_them, wants).url != "http://w1"


def test_room_is_what_is_free_less_what_is_reserved_until_the_report_includes_it() -> None:
    [worker] = workers(1)
    assert worker.has_room(10**9)  # it does not report it
    worker.info = an_info(limits=Limits(block_tokens=16, blocks=100), room=Room(free_blocks=10))
    worker.reported(5.0)
    with worker.reserving(100) as reservation:
        assert reservation.num_blocks == 7
        assert worker.free_blocks == 3
        assert not worker.has_room(100)
        reservation.began_s = 6.0
        worker.reported(5.5)  # it was asked before
        assert worker.free_blocks == 3
        worker.reported(6.5)
        assert worker.free_blocks == 10
    assert worker.free_blocks == 10
    with worker.reserving(100):
        pass
    assert worker.free_blocks == 10
    assert worker.blocks_for(10**6) == 100  # a request that can never fit is for the worker to refuse
