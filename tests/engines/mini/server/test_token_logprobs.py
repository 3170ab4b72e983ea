"""Log probabilities name each token's own bytes, and go out with the text that the token begins."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from kvferry.engines.mini.api import FinishReason, GenerateRequest, Output, SamplingParams, TokenLogprobs
from kvferry.engines.mini.models.tokenizer import Detokenizer, Tokenizer
from kvferry.engines.mini.scheduling.output import Answer
from kvferry.engines.mini.server.token_logprobs import ChoiceLogprobs, Entry, TokenNames
from kvferry.ids import RequestId
from kvferry.web.listen import Listener
from tests.harness.hypothesis_profile import examples
from tests.harness.loop_monitor import LoopMonitor
from tests.harness.scripted_engine import ScriptedEngine, ScriptedWorker, a_server
from tests.harness.tiny_model import make_tiny_model

EMOJI = "😀😀 你好 é"
TEXTS = st.text(alphabet="aé你😀 \n<0x41>▁Ġ", max_size=12) | st.text(max_size=8)


def sentencepiece() -> Tokenizer:
    """As Llama 2 and Gemma: U+2581 for a space, bytes as `<0xNN>`, and a token that is the text of a byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "é", "▁a", "你"]
    merges = [("▁", "a")]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, {"eos_token": "</s>"}, None)


def metaspace() -> Tokenizer:
    tokenizer = sentencepiece()
    backend = tokenizer._backend
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    return Tokenizer(backend, {"eos_token": "</s>"}, None)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(make_tiny_model(tmp_path_factory.mktemp("text") / "m"))


@pytest.fixture(scope="module")
def every(byte_level: Tokenizer) -> list[Tokenizer]:
    return [byte_level, sentencepiece(), metaspace()]


@dataclass
class Run:
    """What an answer of these tokens shows."""

    text: str
    bytes: bytes
    offsets: list[int]
    names: list[str]
    pieces: list[tuple[str, int]]
    finish: FinishReason | None


def run(tokenizer: Tokenizer, tokens: list[int], **sampling: Any) -> Run:
    """Goes through the engine's Answer and the server's ChoiceLogprobs, token by token."""
    params = SamplingParams(max_tokens=len(tokens), **sampling)
    answer = Answer(params, Detokenizer(tokenizer, tokenizer.encode("a")), frozenset((0, 2)), params.max_tokens)
    names = TokenNames(tokenizer)
    logprobs, text, finish = ChoiceLogprobs(names), "", None
    entries: list[Entry] = []
    pieces: list[tuple[str, int]] = []
    for token in tokens:
        finish = answer.push(token, TokenLogprobs(-1.0))
        new_tokens, new_text, new_logprobs = answer.take()
        output = Output(
            request_id=RequestId("r"), token_ids=new_tokens, text=new_text, logprobs=new_logprobs,
            finish_reason=finish.reason if finish else None, stop_reason=finish.stop if finish else None,
        )  # fmt: skip
        taken = logprobs.take(output)
        text, entries = text + new_text, entries + taken
        pieces.append((new_text, len(taken)))
        if finish:
            break
    return Run(
        text, b"".join(one.bytes for one in entries), [one.offset for one in entries],
        [names.of(one.token_id).text for one in entries], pieces, finish.reason if finish else None,
    )  # fmt: skip


@settings(max_examples=examples(200))
@given(text=TEXTS, which=st.integers(0, 2))
def test_the_bytes_of_all_tokens_are_those_of_the_text(every: list[Tokenizer], text: str, which: int) -> None:
    tokenizer = every[which]
    tokens = [token for token in tokenizer.encode(text, add_special_tokens=False) if token not in (0, 1, 2)]
    if not tokens:
        return
    found = run(tokenizer, tokens)
    assert found.bytes == found.text.encode()
    assert len(found.offsets) == len(tokens)
    raw = [tokenizer.token_bytes(token) for token in tokens]
    for i, offset in enumerate(found.offsets):  # the characters before the one that this token begins or continues
        assert offset == len(b"".join(raw[:i]).decode("utf-8", "ignore"))


@settings(max_examples=examples(200))
@given(text=TEXTS, stop=st.text(alphabet="aé你😀 ", min_size=1, max_size=2), which=st.integers(0, 2))
def test_a_stop_string_cuts_log_probabilities_as_it_cuts_text(
    every: list[Tokenizer], text: str, stop: str, which: int
) -> None:
    tokenizer = every[which]
    tokens = [token for token in tokenizer.encode(text, add_special_tokens=False) if token not in (0, 1, 2)]
    if not tokens:
        return
    found = run(tokenizer, tokens, stop=(stop,))
    assert found.bytes.startswith(found.text.encode())
    assert all(offset < len(found.text) for offset in found.offsets)
    for shown, sent in zip(_chars_so_far(found.pieces), _sent_so_far(found.pieces), strict=True):
        assert all(offset < shown for offset in found.offsets[:sent])  # no entry runs ahead of its text


def _chars_so_far(pieces: list[tuple[str, int]]) -> list[int]:
    return [sum(len(text) for text, _ in pieces[: i + 1]) for i in range(len(pieces))]


def _sent_so_far(pieces: list[tuple[str, int]]) -> list[int]:
    return [sum(number for _, number in pieces[: i + 1]) for i in range(len(pieces))]


def test_parts_of_a_character_are_named_by_their_bytes(byte_level: Tokenizer) -> None:
    found = run(byte_level, byte_level.encode("x😀"))
    assert found.names == ["x", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]
    assert found.offsets == [0, 1, 1, 1, 1]
    assert found.pieces == [("x", 1), ("", 0), ("", 0), ("", 0), ("😀", 4)]


def test_the_token_that_ends_an_answer_has_no_bytes(byte_level: Tokenizer) -> None:
    found = run(byte_level, [*byte_level.encode("ab"), 0])
    assert (found.text, found.bytes, found.names) == ("ab", b"ab", ["a", "b", "<eos>"])
    end = byte_level.encode("b")[0]
    found = run(byte_level, byte_level.encode("ab"), stop_token_ids=(end,))
    assert (found.text, found.bytes, found.names) == ("a", b"a", ["a", "b"])
    found = run(byte_level, [*byte_level.encode("a"), 1, *byte_level.encode("b")])  # a special token in the middle
    assert (found.text, found.bytes, found.names) == ("ab", b"ab", ["a", "<|im_start|>", "b"])


def test_half_a_character_at_the_end_keeps_its_bytes(byte_level: Tokenizer) -> None:
    found = run(byte_level, byte_level.encode("a😀")[:3])
    assert (found.text, found.bytes) == ("a\ufffd", b"a\xf0\x9f")


def test_keys_of_tokens_with_one_text_differ_and_the_chosen_one_has_its_text() -> None:
    tokenizer = sentencepiece()
    names = TokenNames(tokenizer)
    letter, byte = tokenizer.encode("a", add_special_tokens=False)[0], 3 + ord("a")
    assert names.of(letter).text == names.of(byte).text == "a"
    assert names.keys(letter, [(byte, -0.1), (letter, -0.2)]) == ["bytes:\\x61", "a"]
    assert names.keys(byte, [(letter, -0.1), (byte, -0.2)]) == ["bytes:\\x61", "a"]
    assert names.top(byte, TokenLogprobs(-9.0, ((letter, -0.1),))) == [(letter, -0.1), (byte, -9.0)]
    assert names.top(letter, TokenLogprobs(-0.1, ((letter, -0.1),))) == [(letter, -0.1)]


# ---- both endpoints


def says(tokenizer: Tokenizer, text: str) -> Callable[[GenerateRequest], list[Output]]:
    """A script: the tokens of this text, none of which is the most likely one."""

    def script(request: GenerateRequest) -> list[Output]:
        tokens = tokenizer.encode(text)
        others = tuple((token, -0.5) for token in range(3, 250) if token not in tokens)[:20]
        answer = Answer(
            request.sampling, Detokenizer(tokenizer, request.prompt_token_ids), frozenset((0,)), len(tokens)
        )
        outputs = []
        for token in tokens:
            finish = answer.push(token, TokenLogprobs(-2.0, others))
            new, shown, logprobs = answer.take()
            outputs.append(
                Output(
                    request_id=request.request_id, token_ids=new, text=shown, logprobs=logprobs,
                    finish_reason=finish.reason if finish else None, stop_reason=finish.stop if finish else None,
                )
            )  # fmt: skip
            if finish:
                break
        return outputs

    return script


async def choices_of(tokenizer: Tokenizer, text: str, endpoint: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The first choice of an answer, or of each event of a stream."""
    worker = ScriptedWorker(ScriptedEngine(says(tokenizer, text)))
    server = a_server(worker, tokenizer, vocab_size=320, max_model_len=20_000)  # type: ignore[arg-type]
    listener = Listener(server.app, "127.0.0.1", 0, shutdown_s=0.2)
    await listener.start()
    try:
        async with aiohttp.ClientSession() as session, session.post(f"{listener.url}/v1/{endpoint}", json=body) as got:
            raw = await got.read()
    finally:
        await listener.stop()
    if not body["stream"]:
        return [json.loads(raw)["choices"][0]]
    events = [json.loads(event[6:]) for event in raw.split(b"\n\n") if event.startswith(b"data: {")]
    return [event["choices"][0] for event in events if event["choices"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat(byte_level: Tokenizer, stream: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}], "stream": stream, "logprobs": True, "top_logprobs": 20,
        "max_tokens": 100,
    }  # fmt: skip
    choices = await choices_of(byte_level, EMOJI, "chat/completions", body)
    content = "".join((choice.get("delta") or choice["message"])["content"] for choice in choices)
    entries = [one for choice in choices for one in choice["logprobs"]["content"]]
    assert content == EMOJI
    assert b"".join(bytes(one["bytes"]) for one in entries) == content.encode()
    for one in entries:
        assert one["top_logprobs"][-1] == {name: one[name] for name in ("token", "logprob", "bytes")}
        assert len(one["top_logprobs"]) == 21


@pytest.mark.parametrize("stream", [False, True])
async def test_completions(byte_level: Tokenizer, stream: bool) -> None:
    body = {"prompt": "a", "stream": stream, "logprobs": 20, "max_tokens": 100}
    choices = await choices_of(byte_level, EMOJI, "completions", body)
    assert "".join(choice["text"] for choice in choices) == EMOJI
    entries = [choice["logprobs"] for choice in choices]
    tokens, top, offsets = (
        [value for one in entries for value in one[name]] for name in ("tokens", "top_logprobs", "text_offset")
    )
    assert [len(one) for one in top] == [21] * len(tokens)  # none is overwritten
    assert all(one[token] == -2.0 for token, one in zip(tokens, top, strict=True))
    assert offsets == [0, 0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 4, 4, 4, 5, 6, 6]


async def test_a_long_answer_with_log_probabilities_does_not_hold_the_loop(byte_level: Tokenizer) -> None:
    for stream in (False, True):
        with LoopMonitor() as monitor:
            body = {"prompt": "a", "stream": stream, "logprobs": 20, "max_tokens": 5000}
            await choices_of(byte_level, "abcd " * 1000, "completions", body)
            monitor.longest = [held for held in monitor.longest if "choices_of" not in held.what]  # the client's part
