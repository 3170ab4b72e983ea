"""What an operator can do wrong with `serve` and `route`: one line with value and remedy, and an exit status."""

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cli.main import ExitCode, main


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def line_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Runs the command, and returns the only line on stderr."""
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("kvferry ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


def test_unknown_role_lists_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "x", "--role", "tepid"])
    assert ended.value.code == ExitCode.USAGE
    assert "invalid choice: 'tepid' (choose from 'prefill', 'decode', 'both')" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "route", "up"])
def test_port_in_use(command: str, taken_port: int, capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    argv = [command, *(["--decode", "http://127.0.0.1:1"] if command == "route" else [str(tiny)])]
    assert main([*argv, "--port", str(taken_port)]) == ExitCode.ERROR
    assert line_of(capsys) == (
        f"kvferry {command}: port {taken_port} on 127.0.0.1 is in use by another process: "
        "give another --port, or 0 for a free one"
    )


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--engine-id", ""], "engine_id='' must have 1 to 160 printable ASCII characters"),
        (["--engine-id", "a\nb"], r"engine_id='a\nb' must have 1 to 160"),
        (["--engine-id", "p" * 161], "engine_id='ppp"),
        (["--served-model-name", "a", ""], "--served-model-name '' is no name"),
        (["--router", "router:8080"], "--router 'router:8080' must begin with http:// or https://"),
    ],
)
def test_a_name_or_an_address_that_cannot_work_is_reported_before_a_model_is_looked_for(
    argv: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/nowhere", "--port", "0", *argv]) == ExitCode.ERROR
    assert part in line_of(capsys)


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", ""], True),
        (["--host", "0.0.0.0", "--side-channel-host", "localhost"], True),
        (["--host", "127.0.0.1"], False),
        ([], False),
    ],
)
def test_http_on_all_addresses_with_the_side_channel_on_loopback_is_warned_of(
    flags: list[str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["serve", "/nowhere", "--port", "0", *flags]) == ExitCode.ERROR
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [("--side-channel-host ADDRESS and --key-file FILE" in text) for text in texts] == ([True] if warned else [])


@pytest.mark.parametrize("command", ["route", "up"])
def test_a_setting_of_the_router_is_refused_by_its_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [command, *(["--decode", "http://127.0.0.1:1"] if command == "route" else ["/nowhere"])]
    assert main([*argv, "--port", "0", "--alarm-share", "2"]) == ExitCode.ERROR
    assert line_of(capsys).endswith("(--alarm-share)")


def test_port_in_use_is_reported_before_a_model_is_looked_for(
    taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/nowhere", "--port", str(taken_port)]) == ExitCode.ERROR
    assert "is in use" in line_of(capsys)


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_port_out_of_range(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/nowhere", f"--port={port}"]) == ExitCode.ERROR
    assert port in line_of(capsys)


def test_a_host_of_another_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/nowhere", "--host", "203.0.113.7", "--port", "0"]) == ExitCode.ERROR
    assert "203.0.113.7" in line_of(capsys)


@pytest.mark.parametrize("command", ["serve", "up"])
def test_a_side_channel_address_of_another_machine_is_reported_before_a_model_is_looked_for(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    assert main(["key", "new", str(key)]) == ExitCode.OK
    capsys.readouterr()
    flags = ["--side-channel-host", "203.0.113.7", "--key-file", str(key), "--port", "0"]
    assert main([command, "/nowhere", *flags]) == ExitCode.ERROR
    assert "cannot listen on --side-channel-host '203.0.113.7' --side-channel-port 0: " in line_of(capsys)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize("command", ["serve", "up"])
def test_peers_are_not_given_every_address_to_connect_to(
    command: str, host: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    assert main(["key", "new", str(key)]) == ExitCode.OK
    capsys.readouterr()
    flags = ["--side-channel-host", host, "--key-file", str(key), "--port", "0"]
    assert main([command, "/nowhere", *flags]) == ExitCode.ERROR
    assert f"--side-channel-host '{host}' is every address of this machine" in line_of(capsys)


def test_no_model_at_that_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/nowhere/at/all", "--port", "0"]) == ExitCode.ERROR
    assert "/nowhere/at/all" in line_of(capsys)


def test_a_directory_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    for file in tiny.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert main(["serve", str(tmp_path), "--port", "0"]) == ExitCode.ERROR
    assert str(tmp_path) in line_of(capsys)


def test_a_truncated_safetensors_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    for file in tiny.iterdir():
        whole = file.read_bytes()
        (tmp_path / file.name).write_bytes(whole[:-1000] if file.suffix == ".safetensors" else whole)
    assert main(["serve", str(tmp_path), "--port", "0"]) == ExitCode.ERROR
    assert "model.safetensors" in line_of(capsys)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--block-tokens", "0"], "block_tokens=0"),
        (["--block-tokens", "0"], "(--block-tokens)"),
        (["--transfer-deadline", "0"], "(--transfer-deadline)"),
        (["--handshake-timeout", "-1"], "(--handshake-timeout)"),
        (["--lease-ttl", "-3"], "lease.ttl_s=-3.0"),
        (["--lease-ttl", "2", "--lease-renew-every", "5"], "renew_every_s=5.0 must be above 0 and below"),
        (["--side-channel-port", "99999"], "side_channel.port=99999"),
        (["--cache-gb", "-1"], "--cache-gb -1 must be above 0"),
        (["--cache-gb", "nan"], "--cache-gb nan must be above 0, and finite"),
        (["--cache-gb", "inf"], "--cache-gb inf must be above 0, and finite"),
    ],
)
def test_settings_out_of_range(flags: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/nowhere", "--port", "0", *flags]) == ExitCode.ERROR
    assert part in line_of(capsys)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--side-channel-host", "0.0.0.0"], "side_channel.host='0.0.0.0' can be reached from other machines"),
        (["--key-file", "/nowhere/key"], "side_channel.key_file='/nowhere/key' cannot be read"),
        (["--ready-file", "/nowhere/ready"], "--ready-file '/nowhere/ready' cannot be written"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "up"])
def test_missing_packages_are_reported_before_a_model_is_looked_for(
    command: str, flags: list[str], part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVFERRY_KEY", raising=False)
    monkeypatch.delenv("KVFERRY_KEY_FILE", raising=False)
    assert main([command, "/nowhere", "--port", "0", *flags]) == ExitCode.ERROR
    assert part in line_of(capsys)


@pytest.mark.parametrize("counts", [["--decode", "0"], ["--prefill", "-1"]])
def test_a_fleet_needs_a_decode_worker(counts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "/nowhere", "--port", "0", *counts]) == ExitCode.ERROR
    assert " ".join(counts) in line_of(capsys)


def test_help_of_a_benchmark_needs_no_torch() -> None:
    import subprocess

    code = (
        "import sys, argparse, kvferry.cli.bench.handoff as bench; "
        "bench.add_arguments(argparse.ArgumentParser()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_wrong_setting_needs_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    import subprocess

    code = (
        "import sys; from kvferry.cli.main import main; "
        "assert main(['serve', 'x', '--lease-ttl', '-3']) == 1; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False).returncode == 0


def test_a_router_without_decode_is_refused_if_no_worker_may_register(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["route", "--prefill", "http://127.0.0.1:1", "--host", "0.0.0.0", "--port", "0"]
    assert main(argv) == ExitCode.ERROR
    assert line_of(capsys) == "kvferry route: no decode worker is given: add --decode URL"


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://", "http://:8100"])
def test_an_invalid_worker_address_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", "--decode", url, "--port", "0"]) == ExitCode.ERROR
    assert f"worker address {url!r}" in line_of(capsys)


def test_env_prints_what_a_bug_report_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_KEY", "top secret")
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert main(["env", "--json"]) == ExitCode.OK
    out = capsys.readouterr().out
    found = json.loads(out)
    assert "top secret" not in out
    assert found["variables"]["KVFERRY_KEY"] == "(set)"
    assert found["variables"]["UCX_TLS"] == "tcp"
    assert found["packages"]["msgspec"]
    assert "UCX" in found["nixl"]["plugins"]
    assert main(["env"]) == ExitCode.OK
    assert "ptrace_scope" in capsys.readouterr().out
