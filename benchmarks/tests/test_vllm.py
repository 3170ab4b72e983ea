"""The vLLM harness and benchmark, without vLLM: a stand-in with vLLM's command line, /health, and a child process."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm import __main__
from benchmarks.vllm.measures import Fleet, grant_cores, waiting_cores
from kvferry.errors import ConfigError, FerryError
from tests.harness import vllm_peer
from tests.harness.vllm_client import ask, decode_first_params, prefill_params, serve_pair
from tests.harness.vllm_models import GEMMA, KV_HEAVY, make_eagle, make_model
from tests.harness.vllm_servers import VllmServer, VllmSpec, free_port, kv_transfer_config
from tests.harness.vllm_zygote import Zygote

STAND_IN = """
import http.server, json, os, subprocess, sys
from multiprocessing import shared_memory
args = sys.argv[1:]
if "--die" in args:
    sys.exit("ValueError: no such model")
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
memory = open(f"/dev/shm/kvferry-test-{os.getpid()}", "w+b"); memory.truncate(4096)
import mmap
kept = mmap.mmap(memory.fileno(), 4096)
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def answer(self, body, code=200):
        self.send_response(code); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(b'hits_total{engine="0",source="here"} 2.0\\nhits_total{engine="0",source="there"} 3.0\\n')
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        params = asked.get("kv_transfer_params") or {}
        if params.get("remote_host") == "fail":
            return self.answer(json.dumps({"error": {"message": "hash mismatch"}}).encode(), 500)
        choice = {"token_ids": [len(asked["prompt"])] * asked["max_tokens"], "finish_reason": "length"}
        back = {"remote_host": "127.0.0.1"} if params.get("do_remote_decode") else None
        if asked["stream"]:
            lines = [f"data: {json.dumps({'choices': [choice]})}", "data: [DONE]", ""]
            return self.answer("\\n\\n".join(lines).encode())
        self.answer(json.dumps({"choices": [choice], "kv_transfer_params": back}).encode())
port = int(args[args.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def spec(tmp_path: Path) -> VllmSpec:
    """Returns a server that is the stand-in."""
    package = tmp_path / "fake" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for part in (package, package.parent, package.parent.parent):
        (part / "__init__.py").write_text("")
    (package / "api_server.py").write_text(STAND_IN)
    env = {"PYTHONPATH": str(tmp_path / "fake")}
    return VllmSpec(name="p0", python=sys.executable, model=tmp_path, connector="none", env=env)


def quiet(_text: str) -> None:
    """Ignores progress."""


@pytest.mark.process
def test_a_server_is_awaited_asked_and_leaves_nothing(spec: VllmSpec) -> None:
    with VllmServer(spec, quiet) as server:
        server.start().wait_ready(20.0)
        pids = server.pids()
        assert len(pids) == 2  # its parent and its child
        shared = Path(f"/dev/shm/kvferry-test-{pids[0]}")
        assert shared.exists()
        assert server.metric("hits_total") == 5.0
        assert server.metric("hits_total", source="there") == 3.0
        assert server.rss_mib() > 0
        assert server.cpu_s() >= 0
        answer = ask(server, [1, 2, 3], max_tokens=2, stream=True)
        assert (answer.status, answer.tokens, answer.first_token_s > 0) == (200, (3, 3), True)
    assert not server.pids()
    assert not shared.exists()
    assert not server.log_path.parent.exists()


@pytest.mark.process
def test_what_outlives_a_killed_parent_is_found_and_ended(spec: VllmSpec) -> None:
    with VllmServer(spec, quiet) as server:
        server.start().wait_ready(20.0)
        parent, child = server.pids()
        os.kill(parent, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while server.running() and time.monotonic() < deadline:
            pass
        assert server.pids() == [child] or not server.pids()
        server.kill()
        assert not server.pids()
        assert not Path(f"/dev/shm/kvferry-test-{parent}").exists()


@pytest.mark.process
def test_a_server_that_ends_at_its_start_is_reported_with_the_reason(spec: VllmSpec) -> None:
    server = VllmServer(spec.but(flags=("--die",)), quiet)
    with pytest.raises(FerryError, match=r"'p0' ended at its start: ValueError: no such model"), server:
        server.start().wait_ready(20.0)
    assert server.log_path.exists()  # the message names the server


@pytest.mark.process
def test_a_pair_is_asked_as_a_router_asks(spec: VllmSpec) -> None:
    with VllmServer(spec, quiet) as prefill, VllmServer(spec.but(name="d0"), quiet) as decode:
        for one in (prefill, decode):
            one.start()
        for one in (prefill, decode):
            one.wait_ready(20.0)
        for way in ("pull", "push-after", "push-first"):
            served = serve_pair(prefill, decode, [5, 6], way=way, max_tokens=3)
            assert served.prefill.ok
            assert served.decode.tokens == (2, 2, 2)
            assert served.first_token_s > 0
        lie = serve_pair(prefill, decode, [5], between=lambda prefilled: prefilled.params | {"remote_host": "fail"})
        assert (lie.decode.status, lie.decode.error) == (500, "hash mismatch")
    assert ask(prefill, [1], max_tokens=1, timeout_s=2.0).status == 0  # the server is gone, and the record says so


def test_cores_are_counted_while_a_grant_is_open_and_while_decode_waits(spec: VllmSpec) -> None:
    """Each count is of one server, and all their requests end."""
    with VllmServer(spec, quiet) as prefill, VllmServer(spec.but(name="d0"), quiet) as decode:
        for one in (prefill, decode):
            one.start()
        for one in (prefill, decode):
            one.wait_ready(20.0)
        fleet = Fleet(None, "", Path(), "push", ["kvferry"], 8192, pairs={"kvferry": (prefill, decode)})  # type: ignore[arg-type]  # nothing is started
        for cores in (grant_cores(fleet, 0.1), waiting_cores(fleet, 0.1)):
            assert set(cores) == {"kvferry"}
            assert 0.0 <= cores["kvferry"] < 4.0


def test_each_connector_is_configured_in_its_own_terms(spec: VllmSpec) -> None:
    assert kv_transfer_config(spec) is None
    push = spec.but(connector="builtin", mode="push", role="decode", policy="recompute", extra={"kv_lease_duration": 8})
    assert kv_transfer_config(push) == {
        "kv_connector": "NixlPushConnector",
        "kv_role": "kv_consumer",
        "engine_id": "p0",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": 8},
        "kv_load_failure_policy": "recompute",
    }
    ours = kv_transfer_config(spec.but(connector="kvferry", role="prefill"), side_port=5)
    assert ours is not None
    assert ours["kv_connector_module_path"] == "kvferry.engines.vllm.connector"
    assert ours["kv_connector_extra_config"] == {"mode": "pull", "side_channel.port": 5}
    with pytest.raises(ConfigError, match=r"connector 'other' is none of"):
        kv_transfer_config(spec.but(connector="other"))
    argv = VllmServer(spec.but(tp=2, pp=2, block_tokens=64, eager=False), quiet).argv()
    assert argv[argv.index("--block-size") + 1] == "64"
    assert "--enforce-eager" not in argv
    first = decode_first_params(VllmServer(spec.but(tp=2), quiet), "abc", "t1")
    assert (first["remote_request_id"], first["tp_size"], first["transfer_mode"]) == ("cmpl-abc-0", 2, "push")
    assert prefill_params("t1")["do_remote_decode"] is True


def test_consecutive_ports_are_free() -> None:
    assert 0 < free_port(3) < 65534


@pytest.mark.parametrize("changes", [{}, KV_HEAVY, GEMMA], ids=["tiny", "kv", "gemma"])
def test_models_are_whole(tmp_path: Path, changes: dict[str, Any]) -> None:
    from safetensors.numpy import load_file

    made = make_model(tmp_path / "m", **changes)
    config = json.loads((made / "config.json").read_text())
    tensors = load_file(made / "model.safetensors")
    keys = tensors["model.layers.0.self_attn.k_proj.weight"]
    assert keys.shape == (config["num_key_value_heads"] * config["head_dim"], config["hidden_size"])
    assert ("lm_head.weight" in tensors) is not config["tie_word_embeddings"]
    (length,) = struct.unpack("<Q", (made / "model.safetensors").read_bytes()[:8])
    assert length % 8 == 0


def test_a_drafter_reads_two_hidden_states(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    tensors = load_file(make_eagle(tmp_path / "e") / "model.safetensors")
    assert tensors["fc.weight"].shape == (64, 128)
    assert "layers.0.self_attn.q_proj.weight" in tensors


def test_stalls_are_removed_from_the_peer_only(tmp_path: Path) -> None:
    """In a separate process: pinning does nothing, yielding sleeps, and NIXL's progress thread gets a delay."""
    api = tmp_path / "nixl_cu12"
    api.mkdir()
    (api / "__init__.py").write_text("")
    (api / "_bindings.py").write_text(
        "class Config:\n    pthrDelay = 0\n\ndef nixlAgentConfig():\n    return Config()\n\n"
        "def nixlAgent(name, config):\n    return config.pthrDelay\n"
    )
    (api / "_api.py").write_text("from nixl_cu12 import _bindings as nixlBind\nother = 1\n")
    site = vllm_peer.write_sitecustomize(tmp_path / "site", "neutralise")
    code = (
        "import os, time\nbegun = time.perf_counter(); os.sched_yield(); print(time.perf_counter() - begun > 4e-5)\n"
        "before = os.sched_getaffinity(0); os.sched_setaffinity(0, [min(before)])\n"
        "print(os.sched_getaffinity(0) == before)\n"
        "import nixl_cu12._api as api, nixl_cu12._bindings as ours\n"
        "theirs = api.nixlBind\n"
        "print(theirs.nixlAgent('a', theirs.nixlAgentConfig()), ours.nixlAgent('b', ours.nixlAgentConfig()))\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    # Code that bypasses NIXL's own API, as kvferry's transport does, is not changed.
    assert done.stdout.split("\n")[:3] == ["True", "True", "100 0"]


@pytest.mark.process
def test_a_zygote_that_cannot_import_is_reported(tmp_path: Path) -> None:
    zygote = Zygote("/bin/false", dict(os.environ))
    with pytest.raises(FerryError, match=r"vLLM"):
        zygote.fork([], {}, tmp_path / "log")
    zygote.close()


def test_wrong_flags_are_reported_before_anything_starts() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    __main__.add_arguments(parser)
    with pytest.raises(ConfigError, match=r"--repeats 0"):
        __main__.run(parser.parse_args(["--repeats", "0"]))
    with pytest.raises(ConfigError, match=r"--vllm-python '/nowhere' does not exist"):
        __main__.run(parser.parse_args(["--vllm-python", "/nowhere"]))
