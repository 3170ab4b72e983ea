"""R43: a worker that computes a prompt is given the workers that hold its first tokens."""

from typing import Any

from kvferry.router.settings import Fetch, RouterSettings
from tests.harness.scripted_worker import Worker, a_decode, a_prefill, fleet
from tests.router.test_sessions import FIRST, SECOND, ask, counting_prefill, long_answer

ALWAYS = RouterSettings(health_every_s=0.05, restart_wait_s=0, fetch=Fetch.ALWAYS)


def able(worker: Worker) -> Worker:
    """The same worker, which gives and fetches KV."""
    assert worker.info is not None
    worker.info["abilities"] = ["fetch"]
    return worker


def sources_of(worker: Worker, number: int) -> Any:
    """The sources in the request `number` that the worker got."""
    return (worker.asked[number].body.get("kv_transfer_params") or {}).get("sources")


async def test_prefill_is_given_the_decode_worker_that_served_the_turn_before() -> None:
    p, d = able(a_prefill(script=counting_prefill)), able(a_decode(script=long_answer))
    async with fleet(p, d, settings=ALWAYS) as (url, _):
        await ask(url, FIRST)
        await ask(url, SECOND)
    assert sources_of(p, 0) is None
    (source,) = sources_of(p, 1)
    assert (source["engine_id"], source["incarnation"], source["host"], source["port"]) == ("d0", "i1", "10.0.0.1", 77)
    assert source["num_tokens"] >= 150 + 200, "the answer's tokens, too"
    assert p.asked[1].body["kv_transfer_params"]["do_remote_decode"] is True
    assert sources_of(d, 1) is None, "decode has the params that prefill returned"


async def test_without_the_setting_or_the_ability_there_are_no_sources() -> None:
    never = RouterSettings(health_every_s=0.05, restart_wait_s=0)
    for settings, decode in ((never, able(a_decode(script=long_answer))), (ALWAYS, a_decode(script=long_answer))):
        p = able(a_prefill(script=counting_prefill))
        async with fleet(p, decode, settings=settings) as (url, _):
            await ask(url, FIRST)
            await ask(url, SECOND)
        assert sources_of(p, 1) is None
