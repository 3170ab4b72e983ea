"""The command: its output, its exit codes, and a prefill end in a process of its own."""

import argparse
import contextlib
import json
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cli.doctor import doctor, wire_check
from kvferry.cli.main import ExitCode, main
from kvferry.sidechannel.shared_key import new_key
from kvferry.transport.memory import MemoryHub
from tests.cli.doctor.test_wire_check import Refusing


def test_a_missing_library_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("kvferry.transport.nixl.nixl", "kvferry.transport.nixl.nixl_errors"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "nixl", None)
    assert main(["doctor"]) == ExitCode.ERROR
    shown = capsys.readouterr()
    assert "FAIL  transport" in shown.out
    assert "pip install 'kvferry[nixl]'" in shown.err


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--transport", "memory", "--megabytes", "1", "--json"]) == ExitCode.OK
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    assert [line["ok"] for line in lines] == [True] * 16
    assert (lines[-1]["exit"], lines[-1]["failed"]) == (0, None)
    assert shown.err == ""


@pytest.mark.process
def test_real_nixl_between_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--transport", "nixl", "--megabytes", "8", "--timeout", "60"]) == ExitCode.OK
    shown = capsys.readouterr()
    assert shown.out.count("  ok  ") == 15
    assert "push: 512 tokens handed over" in shown.out
    assert "READ 8 MiB in 256 blocks, bytes compared" in shown.out


def test_a_failure_goes_to_stderr_with_its_remedy_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = MemoryHub()
    monkeypatch.setattr(wire_check, "make_transport", lambda _name, agent, **_options: Refusing(agent, hub=hub))
    assert main(["doctor", "--transport", "memory", "--megabytes", "1"]) == ExitCode.BAD_TRANSFER
    assert "kvferry doctor: READ 1 MiB in 256 blocks, bytes compared: the link is down. Set UCX_TLS" in (
        capsys.readouterr().err
    )


def test_urls_are_a_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = types.ModuleType("kvferry.cli.support.fleet_matrix")
    asked: list[object] = []

    def run_fleet(urls: list[str], as_json: bool) -> ExitCode:
        asked.append((urls, as_json))
        return ExitCode.UNREACHABLE

    monkeypatch.setattr(fleet, "run_fleet", run_fleet, raising=False)
    monkeypatch.setitem(sys.modules, "kvferry.cli.support.fleet_matrix", fleet)
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args(["http://a:1", "http://b:2", "--json"])) == ExitCode.UNREACHABLE
    assert asked == [(["http://a:1", "http://b:2"], True)]


@contextlib.contextmanager
def listening(*more: str) -> Iterator[int]:
    """A `kvferry doctor --listen` in a process of its own; gives its port."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(3)]
        probes[0].bind(("127.0.0.1", 0))
        port = probes[0].getsockname()[1]
    argv = [sys.executable, "-m", "kvferry", "doctor", "--listen", str(port), "--megabytes", "8", *more]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert f"kvferry doctor --peer 127.0.0.1:{port} --host ITS_ADDRESS" in process.stdout.readline()
        yield port
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.process
def test_two_ends_with_a_key_over_real_nixl(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    key = str(tmp_path / "fleet.key")
    new_key(Path(key))
    with listening("--key-file", key) as port:
        peer = ["doctor", "--peer", f"127.0.0.1:{port}", "--megabytes", "8", "--timeout", "60"]
        assert main([*peer, "--key-file", key]) == ExitCode.OK
        assert capsys.readouterr().out.count("  ok  ") == 7
        assert main([*peer, "--timeout", "1"]) == ExitCode.UNREACHABLE
        assert "without a key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["http://a:1", "--listen", "7000"], "three different checks"),
        (["--peer", "host"], "is not HOST:PORT"),
        (["--listen", "65535"], "the next two ports"),
        (["--megabytes", "0"], "must be between 1 and 1024"),
        (["--listen", "7000", "--host", "192.0.2.1"], "Make a key with"),
    ],
)
def test_flags_that_cannot_be_are_refused(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--transport", "memory", *argv]) != ExitCode.OK
    assert reason in capsys.readouterr().err
