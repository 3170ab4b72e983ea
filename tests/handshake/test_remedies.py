"""Each remedy for `kvferry serve` is typed: the flags that a refusal prints make it go away. R10."""

import argparse
import re
import shlex

import pytest

from kvferry.cli import serve
from kvferry.cli.support.model_description import describe_model
from kvferry.cli.support.worker_flags import engine_settings, ferry_settings
from kvferry.engines.mini.worker import WorkerSettings
from kvferry.handshake.facts import Facts
from kvferry.handshake.table import FACTS
from kvferry.handshake.verdict import Verdict, verdict
from kvferry.settings import Role
from tests.harness.handshake_examples import decode_facts, eagle, facts
from tests.harness.tiny_model import make_tiny_model

MTP = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'"""
DRAFT = """--speculative-config '{"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 2}'"""
NGRAM = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 2}'"""

PAIRS = {
    # what differs: (what prefill was started with, what decode was started with, the facts that refuse the pair)
    "role, of older engines": ("byte-mtp --protocol-max 4", "byte-mtp --protocol-max 4 --role prefill", {"role"}),
    "mode": ("byte-mtp", "byte-mtp --transfer-mode push", {"transfer.mode"}),
    "model": ("byte-mtp", "OTHER", {"model.fingerprint", "model.tokenizer", "model.head_size"}),
    "dtype": ("byte-mtp --dtype bfloat16", "byte-mtp --dtype float32", {"model.dtype", "kv.dtype"}),
    "kv dtype": ("byte-mtp --kv-dtype fp8_e4m3", "byte-mtp", {"kv.dtype"}),
    "no drafter on prefill": ("byte-mtp", f"byte-mtp {MTP}", {"speculation.method"}),
    "another drafter": (f"byte-mtp {MTP}", f"byte-mtp {DRAFT}", {"speculation.method"}),
    "another draft model": (
        f"byte-mtp {DRAFT}", f"byte-mtp {DRAFT.replace('DRAFT', 'byte-mtp')}", {"speculation.draft_fingerprint"},
    ),
    "strict: an old protocol": ("byte-mtp --strict --protocol-max 2", "byte-mtp", {"protocol"}),
    "strict: a drafter on prefill alone": (f"byte-mtp --strict {MTP}", "byte-mtp", {"speculation.method"}),
    "strict: several at once": (
        f"byte-mtp --strict --kv-dtype fp8_e4m3 --dtype float32 {MTP}", f"byte-mtp --transfer-mode push {NGRAM}",
        {"transfer.mode", "model.dtype", "kv.dtype", "speculation.method"},
    ),
}  # fmt: skip
CANNOT_BE_TYPED = {"protocol": "upgrade kvferry"}
"""Remedies that are not flags, because nothing that can be typed changes the fact."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories that stand for OTHER and DRAFT."""
    other = make_tiny_model(tmp_path_factory.mktemp("other"), "llama")
    draft = make_tiny_model(tmp_path_factory.mktemp("draft"), "llama", seed=3, vocab_size=256)
    return {"OTHER": str(other), "DRAFT": str(draft)}


class Worker:
    """What an operator typed after `kvferry serve`, and the facts of such a worker."""

    def __init__(self, typed: str, role: Role) -> None:
        self.model, *words = shlex.split(typed)
        self.flags: dict[str, str | None] = {"--role": str(role)}
        self._take(words)

    def _take(self, words: list[str]) -> None:
        for index, word in enumerate(words):
            if word.startswith("--"):
                value = words[index + 1] if index + 1 < len(words) and not words[index + 1].startswith("--") else None
                self.flags[word] = value

    def type(self, remedy: str) -> None:
        """Changes what was typed, as the remedy says."""
        if removed := re.match(r"remove (--[\w-]+)", remedy):
            del self.flags[removed[1]]
            return
        words = shlex.split(remedy)
        assert words[:2] == ["kvferry", "serve"], f"not to be typed: {remedy}"
        if len(words) > 2 and not words[2].startswith("--"):
            self.model = words.pop(2)
        self._take(words[2:])

    def facts(self) -> Facts:
        """Returns the facts that the worker would state; no weights are loaded."""
        parser = argparse.ArgumentParser()
        serve.add_arguments(parser)
        words = [word for flag, value in self.flags.items() for word in (flag, value) if word is not None]
        args = parser.parse_args([self.model, *words])
        settings = WorkerSettings(
            engine=engine_settings(args.model, args), ferry=ferry_settings(args), role=Role(args.role)
        )
        return Facts.from_json(describe_model(settings)["facts"])


@pytest.mark.parametrize("name", PAIRS)
def test_typing_the_remedies_makes_the_refusal_go_away(name: str, places: dict[str, str]) -> None:
    on_prefill, on_decode, refused = PAIRS[name]
    for place, directory in places.items():
        on_prefill, on_decode = on_prefill.replace(place, directory), on_decode.replace(place, directory)
    prefill, decode = Worker(on_prefill, Role.PREFILL), Worker(on_decode, Role.DECODE)
    answer = verdict(prefill.facts(), decode.facts())
    assert {row.fact for row in answer.blocking()} >= refused
    _type_all(answer, prefill, decode)
    left = verdict(prefill.facts(), decode.facts()).blocking()
    assert [row.fact for row in left if row.fact not in CANNOT_BE_TYPED] == []


def _type_all(answer: Verdict, prefill: Worker, decode: Worker) -> None:
    for row in answer.blocking():
        if row.fact in CANNOT_BE_TYPED:
            assert row.remedy_a == CANNOT_BE_TYPED[row.fact]
            continue
        worker, remedy = (prefill, row.remedy_a) if str(row.change) == "a" else (decode, row.remedy_b)
        if not remedy.startswith("remove") or any(flag in remedy for flag in worker.flags):
            worker.type(remedy)


def test_no_remedy_has_a_placeholder() -> None:
    for spec in FACTS.values():
        for text in spec.settings.values():
            assert "..." not in text, f"{spec.name}: {text}"
            assert not re.search(r"\{(?!value\}|model\}|speculative_config\}|\")", text), f"{spec.name}: {text}"


def test_a_hostile_peer_cannot_break_out_of_the_quotes() -> None:
    row = verdict(facts(speculation=None), decode_facts(speculation=eagle(draft_model="x'; rm -rf ~; '"))).rows[0]
    words = shlex.split(row.remedy_a)
    assert words[:3] == ["kvferry", "serve", "--speculative-config"]
    assert len(words) == 4
