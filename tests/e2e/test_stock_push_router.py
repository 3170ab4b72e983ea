"""Two workers in push with a router that was made for vLLM's own push connector. Real processes, real NIXL.

The requests are those that vllm-router 0.1.17 was seen to send: one X-Request-Id for both, and for decode prefill's
address and that id, without a transfer id.
"""

import json
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.client import Answer, post
from tests.harness.fleet import Fleet
from tests.harness.tiny_model import make_tiny_model

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(180)]

DEADLINE_S = 3.0
FLAGS = ("--dtype", "float32", "--num-blocks", "300", "--threads", "1", "--transfer-deadline", str(DEADLINE_S))
PROMPT = [3 + i % 200 for i in range(120)]
FOR_PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")
    with Fleet(tmp_path_factory.mktemp("push"), *FLAGS, model=str(model), mode="push") as fleet:
        for name, role in (("p", "prefill"), ("d", "decode")):
            fleet.worker(name, role=role)
        for worker in fleet.workers.values():
            worker.wait_ready()
        yield fleet


class StockRouter:
    """One request, as the router sends it to both workers."""

    def __init__(self, fleet: Fleet, prompt: list[int], **more: Any) -> None:
        self._fleet = fleet
        self._body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **more}
        self._headers = {
            "X-Request-Id": f"___prefill_addr_127.0.0.1:8100___decode_addr_127.0.0.1:8200_{uuid.uuid4().hex}"
        }

    def prefill(self) -> Answer:
        body = self._body | {"max_tokens": 1, "kv_transfer_params": FOR_PREFILL}
        return post(self._fleet.workers["p"].url, body, headers=self._headers)

    def decode(self) -> Answer:
        address = self._fleet.workers["p"].describe()
        params = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": address["engine"],
            "remote_host": address["side_channel"]["host"], "remote_port": address["side_channel"]["port"],
            "tp_size": 1, "remote_request_id": self._headers["X-Request-Id"],
        }  # fmt: skip
        body = self._body | {"max_tokens": 8, "kv_transfer_params": params}
        return post(self._fleet.workers["d"].url, body, headers=self._headers)


def account(answer: Answer) -> dict[str, Any]:
    """Returns how the prompt was served."""
    assert answer.status == 200, answer
    return answer.kvferry


def test_prefill_first(fleet: Fleet) -> None:  # R17
    request = StockRouter(fleet, PROMPT)
    assert request.prefill().status == 200
    served = account(request.decode())
    assert (served["handed_over"], served["recomputed"], served["why"]) == (len(PROMPT), 0, "")
    fleet.wait_blocks_free()


def test_decode_first(fleet: Fleet) -> None:  # R17
    request = StockRouter(fleet, PROMPT[1:])
    answers: list[Answer] = []
    waiting = threading.Thread(target=lambda: answers.append(request.decode()))
    waiting.start()
    assert request.prefill().status == 200
    waiting.join()
    assert account(answers[0])["handed_over"] == len(PROMPT) - 1
    fleet.wait_blocks_free()


def test_several_choices(fleet: Fleet) -> None:
    """The router sends `n` to prefill, too. One hand-off serves all choices."""
    request = StockRouter(fleet, PROMPT[2:], n=3)
    prefill = request.prefill()
    assert prefill.status == 200, prefill
    answer = request.decode()
    assert account(answer)["handed_over"] == len(PROMPT) - 2
    assert len(json.loads(answer.body)["choices"]) == 3
    fleet.wait_blocks_free()


def test_a_request_whose_prefill_never_comes_is_answered(fleet: Fleet) -> None:  # R29
    served = account(StockRouter(fleet, PROMPT[3:]).decode())
    assert (served["handed_over"], served["recomputed"]) == (0, len(PROMPT) - 3)
    assert f"{DEADLINE_S:g} s" in served["why"]
    fleet.wait_blocks_free()
