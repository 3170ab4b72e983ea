"""Prefill on vLLM and decode on the embedded engine, and the reverse: one checkpoint, two engines' caches."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.servers import READY_S, Lab, ask, default_python, poll_until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.environ.get("KVFERRY_TEST_VLLM") != "1", reason="it starts vLLM: make test-vllm-all"),
]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    assert Path(default_python()).exists(), "make setup-vllm makes the virtual environment with vLLM"
    with Lab("kvferry") as made:
        yield made


class Embedded:
    """`kvferry serve` as a child process."""

    def __init__(self, model: Path, role: str, scratch: Path) -> None:
        self._ready = scratch / f"{role}.json"
        flags = ["--role", role, "--dtype", "float32", "--port", "0", "--engine-id", f"mini-{role}", "--threads", "1"]
        argv = [sys.executable, "-m", "kvferry", "serve", str(model), *flags, "--ready-file", str(self._ready)]
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    @property
    def url(self) -> str:
        return str(json.loads(self._ready.read_text())["url"])

    def wait_ready(self) -> "Embedded":
        assert poll_until(self._ready.exists, 120.0) >= 0
        return self

    def ask(self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
                                "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        if params is not None:
            body["kv_transfer_params"] = params
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120.0) as answer:
            parsed: dict[str, Any] = json.loads(answer.read())
        return parsed

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.mark.parametrize("way", ["mini-to-vllm", "vllm-to-mini"])
def test_one_checkpoint_on_two_engines(lab: Lab, way: str, tmp_path: Path) -> None:  # R22 R36
    role, other = ("decode", "prefill") if way == "mini-to-vllm" else ("prefill", "decode")
    embedded = Embedded(lab.model(), other, tmp_path)
    server = lab.server(lab.spec(role, "pull", policy="fail"))
    try:
        server.start().wait_ready(READY_S)
        embedded.wait_ready()
        for length in (17, 200, 500):
            prompt = lab.prompt(length)
            if way == "mini-to-vllm":
                params = embedded.ask(prompt, 1, {"do_remote_decode": True})["kv_transfer_params"]
                answer = ask(server, prompt, max_tokens=8, params=params, timeout_s=120.0)
                assert answer.ok, f"{answer.error}: {server.log()[-2000:]}"
                got = list(answer.tokens)
                assert server.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") >= length - 1
            else:
                params = ask(server, prompt, max_tokens=1, params={"do_remote_decode": True}, timeout_s=120.0).params
                answer_ = embedded.ask(prompt, 8, params)
                got = answer_["choices"][0]["token_ids"]
                assert answer_["kvferry"]["handed_over"] >= length - 1, answer_["kvferry"]
            # With another salt, the answer does not come from what was handed over.
            assert got == list(ask(server, prompt, max_tokens=8, timeout_s=120.0, cache_salt="alone").tokens)
    finally:
        server.stop(grace_s=0)
        embedded.close()
