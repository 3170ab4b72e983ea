"""Real processes: bodies of every size and shape arrive while other answers stream, and no loop is held for long."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.client import get, post
from tests.harness.fleet import Fleet
from tests.harness.load import Load, ask_alone
from tests.harness.tiny_model import make_tiny_model

pytestmark = pytest.mark.process

WORDS = b"the cat and a hat "
LONG = "context_length_exceeded"


def bodies() -> list[tuple[str, bytes, str | None]]:
    """The path, the body, and the code of the error; None: it is answered."""
    chat, text = "/v1/chat/completions", "/v1/completions"
    message: dict[str, Any] = {"role": "user", "content": "Hi"}
    return [
        (text, b'{"prompt":"' + WORDS * (20 << 16) + b'"}', LONG),
        (text, b'{"prompt":[' + b", ".join([b"17"] * (7 << 20)) + b"]}", LONG),
        (chat, json.dumps({"messages": [message] * 5000}).encode(), LONG),
        (chat, json.dumps({"messages": [{**message, "content": WORDS.decode() * 50}], "max_tokens": 2}).encode(), None),
        (text, json.dumps({"prompt": "a", "max_tokens": 500, "logprobs": 20, "ignore_eos": True}).encode(), None),
    ]


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_no_loop_of_a_fleet_is_held(tmp_path: Path, mode: str) -> None:
    model = str(make_tiny_model(tmp_path / "model"))
    flags = ("--dtype", "float32", "--num-blocks", "400", "--threads", "1")
    with Fleet(tmp_path / "fleet", *flags, model=model, mode=mode, monitored=True) as fleet:
        workers = [fleet.worker("p", role="prefill"), fleet.worker("d", role="decode")]
        for worker in workers:
            worker.wait_ready()
        fleet.route("--room-wait", "0.1", prefill=workers[:1], decode=workers[1:])
        load = Load(fleet.url, ask_alone(workers[1].url, [[7, 8, 9], [10] * 40], 20), num_clients=2, hang_up=0.1)
        for path, raw, code in bodies():
            for url in (workers[1].url, fleet.url):
                answer = post(url, None, path=path, raw=raw)
                codes = {code, "overloaded"} if code is not None and url == fleet.url else {code}
                assert (answer.error or {}).get("code") in codes, (url, path, len(raw), answer)
                assert get(url, "/health")["status"] == "ok"
        tally = load.end()
        assert not tally.faults, tally.faults
