"""What commands show: styled on a terminal, plain when piped or with NO_COLOR."""

import io

import pytest

from kvferry.cli.support.terminal import Terminal, plural, size, styled


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO) -> str:
    terminal = Terminal(stream)
    terminal.line("[prefill-0] ", ("red", "red"), " 12 http://127.0.0.1:8080/ui :smile:")
    terminal.table(("name", "count"), [("a" * 90, "1"), (styled(("b", "green")), "22")], right="count", indent=2)
    terminal.error("it failed")
    with terminal.waiting("starting"):
        terminal.step("ready", "pid 1", 0.5)
    with terminal.counting("hand-offs") as count:
        count(5, 0.1)
    return stream.getvalue()


@pytest.mark.parametrize("variable", ["", "NO_COLOR"])
def test_plain_text_when_piped_or_requested(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # variables of other programs: only the stream decides here
    if variable:
        monkeypatch.setenv(variable, "1")
    text = show(_Screen() if variable else io.StringIO())
    assert text.splitlines() == [
        "[prefill-0] red 12 http://127.0.0.1:8080/ui :smile:",
        f"  name{' ' * 88}count",
        f"  {'a' * 90}      1",
        f"  b{' ' * 94}22",
        "kvferry: it failed",
        "  ..  starting",
        "  ok  ready                0.5 s  pid 1",
    ]


def test_colour_and_a_line_that_redraws_itself_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = show(_Screen())
    assert "\x1b[31mred\x1b[0m" in text
    assert "[prefill-0]" in text
    assert ":smile:" in text
    assert "starting" in text


def test_a_bar_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Terminal(io.StringIO()).bar() is None
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = _Screen()
    bar = Terminal(screen).bar()
    assert bar is not None
    for _ in range(2):  # it can be used again
        bar.update("load tiny", 5, 10)
        bar.end()
        bar.end()
    assert "load tiny" in screen.getvalue()


def test_plurals_and_sizes() -> None:
    assert [plural(count, "edge") for count in (0, 1, 1200)] == ["0 edges", "1 edge", "1,200 edges"]
    assert [size(count) for count in (640, 12800, 3 << 30)] == ["640 B", "12.5 KiB", "3 GiB"]
