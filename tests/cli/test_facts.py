"""kvferry facts MODEL: what a worker would state, without starting one."""

import json
from pathlib import Path

import pytest

from kvferry.cli.main import main


def output_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict[str, object]]:
    assert main(["facts", *argv, "--json"]) == 0
    facts: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out)["facts"]
    return facts


def test_flags_reach_the_facts(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = output_of(
        capsys, str(tiny), "--role", "decode", "--dtype", "float32", "--transfer-mode", "push",
        "--block-tokens", "8", "--protocol-max", "1", "--strict",
    )  # fmt: skip
    expected = {
        "role": "decode",
        "model.dtype": "float32",
        "kv.dtype": "float32",
        "transfer.mode": "push",
        "kv.block_tokens": [8],
        "protocol": 1,
        "handshake.strict": True,
    }
    assert {name: facts[name]["value"] for name in expected} == expected
    assert facts["engine.name"]["class"] == "must match"  # strict


def test_a_saved_prefill_and_a_saved_decode_are_compared(tiny: Path, tmp_path: Path) -> None:
    sides = {"p": ["--role", "prefill"], "d": ["--role", "decode"], "other": ["--role", "decode", "--dtype", "float32"]}
    for name, flags in sides.items():
        flags = flags if "--dtype" in flags else [*flags, "--dtype", "bfloat16"]
        assert main(["facts", str(tiny), *flags, "-o", str(tmp_path / name)]) == 0
    assert main(["compare", str(tmp_path / "p"), str(tmp_path / "d")]) == 0
    assert main(["compare", str(tmp_path / "p"), str(tmp_path / "other")]) == 3


def test_what_serve_refuses_has_no_facts(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["facts", str(tiny), "--pp", "99"]) == 1
    assert "pp=99 stages" in capsys.readouterr().err
    assert main(["facts", str(tiny), "--tp", "97"]) == 1
    assert "tp=97 does not divide" in capsys.readouterr().err


def test_a_missing_model_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["facts", str(tmp_path / "nothing")]) == 1
    assert "kvferry facts: " in capsys.readouterr().err


def test_a_path_that_cannot_be_written_is_reported(
    tiny: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["facts", str(tiny), "-o", str(tmp_path / "no" / "file")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_the_limits_of_a_model_are_those_of_its_context_and_its_cache(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def limits(*flags: str) -> dict[str, int]:
        assert main(["facts", str(tiny), "--json", *flags]) == 0
        stated: dict[str, int] = json.loads(capsys.readouterr().out)["limits"]
        return stated

    small = limits("--num-blocks", "9", "--block-tokens", "8")
    assert (small["blocks"], small["block_tokens"], small["tokens"]) == (8, 8, 65)
    assert limits("--max-model-len", "20")["tokens"] == 20
