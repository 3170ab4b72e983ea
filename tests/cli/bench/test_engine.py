"""`kvferry bench engine` on a tiny model: it runs, counts, and writes what it should. No figure is checked."""

import json
from pathlib import Path

import pytest

from kvferry.cli.main import ExitCode, main

pytestmark = [pytest.mark.engine, pytest.mark.process]


def _bench(*arguments: str) -> ExitCode:
    """Runs the command in this process; what it measures runs in processes of its own."""
    return ExitCode(main(["bench", "engine", "--threads", "1", *arguments]))


def test_one_object_per_line_and_a_file_with_the_environment(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--prompt-tokens", "8", "--new-tokens", "3", "--batches", "1", "2", "--repeats", "1")
    kinds = ("--dtypes", "float32", "--engines", "mini", "transformers")
    code = _bench("--model", str(tiny), *kinds, *sizes, "--json", "--out", str(tmp_path))
    shown = capfd.readouterr()
    assert code == ExitCode.OK, shown.err
    lines = [json.loads(line) for line in shown.out.splitlines()]
    found = [(line["engine"], line["dtype"], line["batch"]) for line in lines]
    assert found == [(engine, "float32", batch) for engine in ("mini", "transformers") for batch in (1, 2)]
    assert all(line["prefill_tok_s"] > 0 and line["decode_tok_s"] > 0 for line in lines)
    recorded = json.loads((tmp_path / "engine.json").read_text())
    assert recorded["results"] == lines
    assert {"cpu", "cores", "packages"} <= set(recorded["environment"])


def test_an_engine_that_fails_is_named_and_the_others_go_on(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--prompt-tokens", "8", "--new-tokens", "2", "--batches", "1", "--repeats", "1", "--json")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)
    arguments = ("--model", str(tiny), "--dtypes", "float32", "--engines", "vllm", "mini", *sizes)
    assert _bench(*arguments, "--vllm-python", str(broken)) == ExitCode.ERROR
    shown = capfd.readouterr()
    assert "vllm float32 ended with exit status 7" in shown.err
    assert [json.loads(line)["engine"] for line in shown.out.splitlines()] == ["mini"]


def test_a_missing_model_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (("--model", str(tmp_path / "none")), "there is no model at"),
        (("--vllm-python", str(tmp_path / "none")), "--vllm-python="),
        (("--new-tokens", "1"), "--new-tokens must be 2 or more"),
    ):
        code = _bench(*arguments, *(() if "--model" in arguments else ("--model", str(tmp_path))))
        assert code == ExitCode.ERROR
        assert message in capfd.readouterr().err
