"""The argument parser of every command: short errors that suggest what was meant, and flags that state their unit."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NoReturn

__all__ = ["Parser", "metavar_of"]

_METAVARS = (("_s", "SECONDS"), ("_bytes", "BYTES"), ("_tokens", "TOKENS"), ("_gb", "GIB"), ("_mib", "MIB"))
_CHOICE = re.compile(r"(?:argument (?P<flag>\S+): )?invalid choice: (?P<value>'.*?'|\S+) \(choose from (?P<all>.*)\)$")
_VALUE = re.compile(r"argument (?P<flag>\S+): invalid (?P<kind>\w+) value: '(?P<value>.*)'$", re.S)
_KINDS = {"int": "a whole number", "float": "a number"}
_UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors take two lines, with a suggestion where a word is nearly right."""

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parses the words, or those of the process.

        As `parse_args`, but a word that nothing takes is an error of the subcommand that it was given to.
        """
        parsed, extra = self.parse_known_args(argv)
        if extra:
            self._parser_of(parsed).error(_UNKNOWN + " ".join(extra))
        return parsed

    def _parser_of(self, parsed: argparse.Namespace) -> "Parser":
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(str(getattr(parsed, action.dest, "")))
                if isinstance(chosen, Parser):
                    return chosen._parser_of(parsed)
        return self

    def error(self, message: str) -> NoReturn:
        """Writes what is wrong and where the flags are listed, and ends with exit status 2."""
        print(f"{self.prog}: {self._explain(message)}\nTry: {self.prog} --help", file=sys.stderr)
        self.exit(2)

    def _explain(self, message: str) -> str:
        if found := _VALUE.match(message):
            flag, value = found["flag"], found["value"]
            if found["kind"] in _KINDS:
                return f"{flag}: {value!r} is not {_KINDS[found['kind']]}"
            message = f"argument {flag}: invalid choice: {value!r} (choose from {', '.join(self._choices_of(flag))})"
        if found := _CHOICE.match(message):
            value, names = found["value"].strip("'"), found["all"].replace("'", "").split(", ")
            if found["flag"] is None or not found["flag"].startswith("-"):
                nearest = _nearest(value, names) or f": choose from {', '.join(names)}"
                what = (found["flag"] or "command").lower()
                return f"{value!r} is not {'an' if what[0] in 'aeiou' else 'a'} {what}{nearest}"
            return message.removeprefix("argument ") + _nearest(value, names)
        if message.startswith(_UNKNOWN):
            extra = message.removeprefix(_UNKNOWN)
            word = extra.split(" ", 1)[0].split("=", 1)[0]
            if not word.startswith("-"):
                return f"{extra!r} is too much: this command takes no more words"
            return f"there is no flag {word}" + _nearest(word, self._option_string_actions)
        return message.removeprefix("argument ")

    def _choices_of(self, flag: str) -> list[str]:
        """Returns the values that a flag takes whose type is an enumeration."""
        kind = next((action.type for action in self._actions if "/".join(action.option_strings) == flag), None)
        return [repr(str(one.value)) for one in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []


def _nearest(word: str, known: Iterable[str]) -> str:
    names = {name.lstrip("-"): name for name in known}
    found = difflib.get_close_matches(word.lstrip("-"), names, n=1)
    return f". Did you mean {names[found[0]]}?" if found else ""


def metavar_of(field: str, kind: type | None = None) -> str:
    """Returns the placeholder of a flag's value, by the unit in the name of the setting: `ttl_s` takes SECONDS."""
    for ending, shown in _METAVARS:
        if field.endswith(ending):
            return shown
    return "FILE" if field.endswith("_file") else "N" if kind in (int, float) else field.upper()
