"""Everything that pages ask a reader to type is accepted: commands by the real parsers, targets by make, and Python."""

import ast
import re
from pathlib import Path

import pytest

from kvferry.cli.bench.command import BENCHMARKS
from kvferry.cli.main import COMMANDS, make_parser
from tests.harness.doc_blocks import PAGES, blocks_of, commands_of, kvferry_argv
from tests.harness.repository import ROOT

SHELL = ("console", "sh", "bash")
PROSE = re.compile(r"`(kvferry [^`\n]*)`")
INDENTED = re.compile(r"(?m)^    (kvferry (?!\.\.\.).*)$")


def accept(argv: list[str]) -> None:
    """Parses a command line without running it. Raises SystemExit if it is refused."""
    args = make_parser(argv[0] if argv[0] in COMMANDS else None).parse(argv)
    if args.command == "bench":
        assert args.name == "all" or args.name in BENCHMARKS


def flags_of(command: str) -> set[str]:
    """Returns every flag of a command."""
    sub = next(action for action in make_parser(command)._actions if action.dest == "command").choices[command]  # type: ignore[index]
    return set(sub._option_string_actions)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_accepted(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [command.text for block in blocks_of(page) if block.language in SHELL for command in commands_of(block)]
    lines += [line.rstrip("\\") for line in INDENTED.findall(re.sub(r"(?ms)^```.*?^```$", "", page.read_text()))]
    for line in lines:
        for argv in kvferry_argv(line):
            if argv and "--help" not in argv:
                try:
                    accept(argv)
                except SystemExit:
                    pytest.fail(f"{page.relative_to(ROOT)}: {line!r}: {capsys.readouterr().err}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_sentences_name_commands_and_flags_that_exist(page: Path) -> None:
    wrong = []
    for text in PROSE.findall(re.sub(r"(?ms)^```.*?^```$", "", page.read_text())):
        words = text.replace("\\|", "|").split()[1:]
        command = next((word for word in words if not word.startswith("-")), "")
        if command in ("...", "NAME", "COMMAND", ""):
            continue
        if command not in COMMANDS:
            wrong.append(f"{text}: no such command")
            continue
        known = flags_of(command)
        wrong += [
            f"{text}: {flag} is no flag"
            for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", " ".join(words))
            if command != "bench" and flag not in known
        ]
    assert not wrong, f"{page.relative_to(ROOT)}: {wrong}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text()))
    named = set(re.findall(r"(?:`|^    |^\$ )(?:[A-Z_]+=\S+ )?make ([a-z][\w-]*)", page.read_text(), re.M))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_compile(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            ast.parse(block.text, block.where)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_block_that_is_not_run_has_a_reason(page: Path) -> None:
    for block in blocks_of(page):
        assert block.reason is None or len(block.reason) > 5, block.where


def reading_order(page: Path) -> list[str]:
    """Returns the files of the numbered list after "read the code"."""
    text = page.read_text()
    after = text[text.lower().index("read the code") :]
    return re.findall(r"(?m)^\d\. `([\w/]+\.py)`", after.split("\n## ")[0] if "\n## " in after[5:] else after)[:7]


def test_the_reading_order_closes_and_is_the_same_in_both_places() -> None:
    order = reading_order(ROOT / "README.md")
    assert len(order) == 7
    assert reading_order(ROOT / "docs" / "explanation" / "architecture.md") == order
    modules = ["kvferry." + name.removesuffix(".py").replace("/", ".") for name in order]
    for number, name in enumerate(order):
        imported = re.findall(r"(?m)^\s*from (kvferry[\w.]+) import", (ROOT / "src" / "kvferry" / name).read_text())
        assert not set(imported) & set(modules[number + 1 :]), f"{name} needs a file that comes later"
