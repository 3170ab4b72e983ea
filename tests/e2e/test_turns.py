"""R40, R41, R43: the turns of a conversation on real processes: prefill fetches what decode holds of them."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.client import complete, metrics
from tests.harness.fleet import Fleet, Process
from tests.harness.vllm_models import make_model

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(300)]

FLAGS = ("--dtype", "float32", "--num-blocks", "256", "--max-batch-tokens", "64", "--verify", "all",
         "--lease-ttl", "3", "--lease-renew-every", "0.5", "--quarantine", "0.5")  # fmt: skip
ANSWER: dict[str, Any] = {"max_tokens": 33, "ignore_eos": True, "temperature": 0, "model": "model"}


def fetched(*workers: Process) -> int:
    """The prompt tokens that workers have fetched so far."""
    name = 'kvferry_prompt_tokens_total{source="fetched"}'
    return int(sum(metrics(worker.url).get(name, 0) for worker in workers))


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_prefill_computes_only_what_is_new_in_a_turn(mode: str, tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "model"))
    with Fleet(tmp_path / "fleet", *FLAGS, model=model, mode=mode) as fleet:
        prefill = fleet.worker("p", role="prefill")
        decode = [fleet.worker(name, role="decode") for name in ("d0", "d1")]
        alone = fleet.worker("alone", role="both")
        for worker in (prefill, *decode, alone):
            worker.wait_ready()
        fleet.route("--fetch", "always", prefill=[prefill], decode=decode)
        said = list(range(10, 90))
        for turn in range(4):
            before = fetched(prefill)
            answer = complete(fleet.url, said, **ANSWER)
            assert answer.token_ids == complete(alone.url, said, **ANSWER).token_ids, f"turn {turn}"
            if turn:
                assert fetched(prefill) - before >= 32, "the answer before, which only decode had"
                assert answer.kvferry["cached"] + answer.kvferry["handed_over"] == len(said)
                assert answer.kvferry["cached"] >= len(said) - 40
            said += [*answer.token_ids, *range(100 + turn, 107 + turn)]
        holder = next(worker for worker in decode if worker.name == answer.kvferry["decode"])
        holder.kill()
        before = fetched(prefill)
        answer = complete(fleet.url, said, **ANSWER)
        assert answer.token_ids == complete(alone.url, said, **ANSWER).token_ids, "computed, because its holder is dead"
        assert fetched(prefill) == before
        holder.restart()
