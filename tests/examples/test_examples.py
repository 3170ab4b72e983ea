"""Every example runs, and shows what it says."""

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.harness.repository import ROOT
from tests.harness.tiny_model import make_tiny_model
from tests.harness.until import until
from tests.harness.vllm_models import make_model

EXAMPLES = ROOT / "examples"


def run(name: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_has_a_test_here() -> None:
    here = Path(__file__).read_text()
    missing = [path.name for path in EXAMPLES.iterdir() if path.is_file() and f'"{path.name}"' not in here]
    assert missing == []


@pytest.mark.parametrize(
    ("mode", "messages"),
    [("pull", ["Claim", "Ready", "Confirm"]), ("push", ["Register", "Renew", "RenewAck", "Wrote", "Confirm"])],
)
def test_one_handoff_prints_every_message(mode: str, messages: list[str]) -> None:
    lines = run("one_handoff.py", mode).splitlines()
    assert [line.split(maxsplit=3)[3].partition("(")[0] for line in lines if " -> " in line] == messages
    assert lines[-1] == "decode/d1/0 reports to its scheduler: t1 landed, 48 tokens"


def test_an_own_engine_gives_the_tokens_of_one_engine_alone() -> None:
    alone, together, in_use = (line[20:] for line in run("own_engine.py").splitlines())
    assert alone == together
    assert in_use == "0"


def test_an_own_engine_uses_public_names_only() -> None:
    text = (EXAMPLES / "own_engine.py").read_text()
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from ")) and "kvferry" in line]
    assert imports == ["import kvferry", "from kvferry.layout.builders import block_major, head_range"]


@pytest.mark.engine
@pytest.mark.process
@pytest.mark.parametrize("transport", ["memory", "nixl"])
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_two_engines_hand_the_whole_prompt_over(tmp_path: Path, transport: str, mode: str) -> None:
    model = make_tiny_model(tmp_path / "llama")
    shown = run("two_engines.py", str(model), "--transport", transport, "--mode", mode)
    assert " handed over, 0 cached, 0 recomputed" in shown


def test_the_vllm_script_can_be_read_by_bash() -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / "vllm_pd.sh")], check=True)


@pytest.mark.vllm
@pytest.mark.process
@pytest.mark.timeout(400)
@pytest.mark.skipif(os.environ.get("KVFERRY_TEST_VLLM") != "1", reason="it needs vLLM: make test-vllm")
def test_the_vllm_script_serves(tmp_path: Path) -> None:
    model = make_model(tmp_path / "llama")
    python = ROOT / ".venv-vllm" / "bin" / "python"
    environ = {
        **os.environ,
        "PYTHON": str(python),
        "VLLM_ARGS": "--enforce-eager --dtype float32 --max-model-len 512",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    script = subprocess.Popen([str(EXAMPLES / "vllm_pd.sh"), str(model), "8340"], env=environ)
    try:
        body = b'{"prompt": "once upon a time", "max_tokens": 4}'
        request = urllib.request.Request("http://127.0.0.1:8340/v1/completions", body)

        def answered() -> bool:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return bool(answer.status == 200)
            except OSError:
                assert script.poll() is None, "the script has ended"
                return False

        until(answered, "the router answers", within_s=300.0, every_s=1.0)
    finally:
        script.terminate()
        script.wait(60)
