"""Mistyped commands: two lines, exit status 2, and the word that was probably meant."""

import pytest

from kvferry.cli.bench.command import BENCHMARKS
from kvferry.cli.main import COMMANDS, ExitCode, main, make_parser


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """Runs a command that is not understood, and returns the lines on stderr."""
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    assert ended.value.code == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["srve", "x"], "kvferry: 'srve' is not a command. Did you mean serve?"),
        (["bench", "plam"], "kvferry bench: 'plam' is not a benchmark. Did you mean plan?"),
        (["bench", "plan", "--quik"], "kvferry bench plan: there is no flag --quik. Did you mean --quick?"),
        (["serve", "x", "--lease-tll", "4"], "kvferry serve: there is no flag --lease-tll. Did you mean --lease-ttl?"),
        (["route", "--preffill=http://p"], "kvferry route: there is no flag --preffill. Did you mean --prefill?"),
        (["serve", "x", "--wat"], "kvferry serve: there is no flag --wat"),
        (["env", "more"], "kvferry env: 'more' is too much: this command takes no more words"),
        (["up"], "kvferry up: the following arguments are required: model"),
        (
            ["serve", "x", "--role", "decod"],
            "kvferry serve: --role: invalid choice: 'decod' (choose from 'prefill', 'decode', 'both'). "
            "Did you mean decode?",
        ),
        (["up", "x", "--prefill", "two"], "kvferry up: --prefill: 'two' is not a whole number"),
        (["serve", "x", "--cache-gb", "much"], "kvferry serve: --cache-gb: 'much' is not a number"),
        (
            ["route", "--prefill-policy", "least-load"],
            "kvferry route: --prefill-policy: invalid choice: 'least-load' (choose from 'round_robin', 'least_loaded', "
            "'power_of_two', 'prefix_aware'). Did you mean least_loaded?",
        ),
        (["key", "nw", "x"], "kvferry key: 'nw' is not an action. Did you mean new?"),
    ],
)
def test_two_lines_suggest_what_was_meant(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, *argv)
    assert lines == [line, f"Try: {line.split(':')[0]} --help"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_help_text_and_a_default(command: str) -> None:
    parser = make_parser(command)
    sub = next(action for action in parser._actions if action.dest == "command").choices[command]  # type: ignore[index]
    for action in sub._actions:
        if action.dest in ("help", "action", "rest"):
            continue
        assert action.help, f"{command}: {action.dest} has no help"
        takes_value = action.option_strings and action.nargs != 0
        if takes_value and action.dest not in ("prefill", "decode", "out", "svg", "world"):
            assert "default" in action.help, f"{command}: {action.option_strings} does not say its default"


def test_help_lists_every_benchmark() -> None:
    assert all(name in COMMANDS["bench"] for name in BENCHMARKS)


def test_a_log_level_before_or_after_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_parser("env").parse(["--log-level", "error", "env"]).log_level == "error"
    assert make_parser("env").parse(["env", "--log-level", "error"]).log_level == "error"
    assert make_parser("env").parse(["-v", "env"]).verbose
    assert said(capsys, "env", "--log-level", "loud")[0].startswith("kvferry env: --log-level: invalid choice: 'loud'")
