"""Digests of long prompts are computed while the model computes the prompt (R51)."""

import threading
from typing import Any

import pytest

from kvferry.connector.digest_thread import DigestThread
from kvferry.wire.params import HandoffParams
from kvferry.wire.prompt_digest import Prompt
from tests.harness.scripted_half import Request, decode_request, make

LONG = range(3000)


def hashed_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets the name of the thread for each hash over a prompt."""
    names: list[str] = []
    original = Prompt._hash

    def hash_and_note(prompt: Prompt, body: Any) -> bytes:
        names.append(threading.current_thread().name)
        return original(prompt, body)

    monkeypatch.setattr(Prompt, "_hash", hash_and_note)
    return names


def test_a_long_prompt_is_hashed_on_the_thread_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = hashed_on(monkeypatch)
    digests, prompt = DigestThread(), Prompt.of(LONG)
    digests.submit(prompt)
    digests.close()  # ends after what was submitted
    assert names == ["kvferry-digests"]
    digest = prompt.digest
    assert names == ["kvferry-digests"]
    assert digest == Prompt.of(LONG).digest


def test_a_short_prompt_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    names = hashed_on(monkeypatch)
    digests, prompt = DigestThread(), Prompt.of(range(100))
    digests.submit(prompt)
    digests.close()
    digests.close()
    assert names == []
    assert prompt.digest == Prompt.of(range(100)).digest


def test_only_prefill_hashes_ahead_because_decode_needs_the_digest_at_once() -> None:
    ahead: list[Prompt] = []
    half = make(hash_ahead=ahead.append)
    half.on_new_request(decode_request())
    half.on_new_request(Request(handoff=None))
    assert ahead == []
    prefill = Request(handoff=HandoffParams(do_remote_decode=True))
    half.on_new_request(prefill)
    assert ahead == [prefill.prompt]
