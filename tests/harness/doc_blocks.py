"""The fenced blocks of the documentation, and the commands in them.

A comment on the line before a block, `<!-- not run: REASON -->`, says why one machine cannot run it as it stands.
`<!-- with vLLM -->` says that it needs vLLM, which has an environment of its own.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.harness.repository import ROOT

__all__ = ["PAGES", "Block", "Command", "blocks_of", "commands_of", "kvferry_argv"]

PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts)]
_FENCE = re.compile(
    r"(?:<!-- (?:not run: (?P<reason>[^\n]*?)|(?P<vllm>with vLLM)) -->\n)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
_END = {"|", "&", "&&", ";", ">", ">>"}


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None
    """The reason why it is not run, or None if it is."""
    with_vllm: bool = False
    """Whether it needs vLLM."""

    @property
    def where(self) -> str:
        """The place of the block as page and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a block, and the output that the block shows for it."""

    text: str
    output: tuple[str, ...]


def blocks_of(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start("text")) + 1,
            found["language"],
            found["text"],
            found["reason"],
            found["vllm"] is not None,
        )
        for found in _FENCE.finditer(text)
    ]


def commands_of(block: Block) -> list[Command]:
    """Returns the commands of a console or sh block. A command continues while a quote or a backslash is open."""
    console = block.language == "console"
    found: list[tuple[str, list[str]]] = []
    open_command = False
    for line in block.text.splitlines():
        if open_command:
            found[-1] = (f"{found[-1][0]}\n{line}", [])
        elif console and not line.startswith("$ "):
            assert found, f"{block.where}: output before the first command"
            found[-1][1].append(line)
            continue
        elif line.strip():
            found.append((line.removeprefix("$ "), []))
        open_command = bool(found) and not _complete(found[-1][0])
    return [Command(text, tuple(output)) for text, output in found]


def _complete(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return not text.endswith("\\")


def kvferry_argv(text: str) -> Iterator[list[str]]:
    """Yields the arguments of every `kvferry ...` in a command, without redirections, placeholders and comments."""
    words = shlex.split(re.sub(r"\[[a-z ]+\]", "", text), comments=True)
    for start, word in enumerate(words):
        if word != "kvferry" and not word.endswith("/kvferry"):
            continue
        end = next((at for at in range(start + 1, len(words)) if words[at] in _END), len(words))
        yield [_concrete(one) for one in words[start + 1 : end] if one != "..."]


def _concrete(word: str) -> str:
    """Returns the first of the choices `a|b|c`, and a value for a placeholder."""
    return {"N": "1", "M": "1"}.get(word, word.split("|")[0])
