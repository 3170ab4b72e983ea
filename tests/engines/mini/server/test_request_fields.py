"""The table of request fields, tried field by field: at, below and beyond each bound, with each wrong type, on both
endpoints, streamed and not. The values that are let through are then computed by a real engine in test_real_engine.py.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
import pytest
from openai.types import completion_create_params as openai_completions
from openai.types.chat import chat_completion_stream_options_param as openai_stream_options
from openai.types.chat import completion_create_params as openai_chat

from kvferry.engines.mini.server.request_body import ChatBody, CompletionBody, StreamOptions
from kvferry.engines.mini.server.request_fields import Done, Field, fields_of
from tests.harness.request_values import BASES, KINDS, at_bounds, beyond_bounds
from tests.harness.scripted_engine import ScriptedWorker, listening

ENDPOINTS = sorted(KINDS)
OF_VLLM = (
    "add_generation_prompt",
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "ec_transfer_params",
    "echo",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "length_penalty",
    "logprob_token_ids",
    "media_io_kwargs",
    "min_p",
    "min_tokens",
    "mm_payload",
    "mm_processor_kwargs",
    "priority",
    "prompt_embeds",
    "prompt_logprobs",
    "reasoning_effort",
    "repetition_detection",
    "repetition_penalty",
    "request_id",
    "return_mm_kwargs",
    "return_prompt_text",
    "return_token_ids",
    "return_token_offsets",
    "return_tokens_as_token_ids",
    "routed_experts_prompt_start",
    "session_id",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "stream_interval",
    "structured_outputs",
    "thinking_token_budget",
    "top_k",
    "truncate_prompt_tokens",
    "truncation_side",
    "use_beam_search",
    "vllm_xargs",
    "watermarking",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "logits_processors",
)
"""The fields of vLLM 0.32 that OpenAI's API has not, and those of older versions."""


async def post(session: aiohttp.ClientSession, url: str, endpoint: str, body: str) -> tuple[int, dict[str, Any]]:
    """Returns the status, and the error if there is one, also if it comes within a stream."""
    async with session.post(f"{url}/v1/{endpoint}", data=body) as response:
        text = await response.text()
    if response.status == 200:
        assert '"error"' not in text, text
        return 200, {}
    return response.status, json.loads(text)["error"]


def done_fields(endpoint: str) -> Iterator[tuple[str, Field, Any]]:
    for name, (entry, hint) in fields_of(KINDS[endpoint]).items():
        if entry.does is Done.YES:
            yield name, entry, hint


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_each_number_at_its_bounds_is_taken_and_beyond_them_refused(endpoint: str, stream: bool) -> None:
    worker = ScriptedWorker()
    wrong: list[object] = []
    async with listening(worker) as url, aiohttp.ClientSession() as session:
        for name, entry, _ in done_fields(endpoint):
            for value in at_bounds(name, entry):
                body = {**BASES[endpoint], "stream": stream, **value}
                status, error = await post(session, url, endpoint, json.dumps(body))
                if status != 200 and error["code"] != "context_length_exceeded":
                    wrong.append((value, status, error))
            num_added = len(worker.engine.added)
            for raw in beyond_bounds(name, entry):
                text = json.dumps({**BASES[endpoint], "stream": stream})[:-1] + f', "{name}": {raw}}}'
                status, error = await post(session, url, endpoint, text)
                known = error.get("code") in ("out_of_range", "invalid_type", "invalid_json")
                if status != 400 or not known or (error["code"] != "invalid_json" and name not in str(error["param"])):
                    wrong.append((name, raw[:40], status, error))
                if error.get("code") == "out_of_range" and entry.range_text not in error["message"]:
                    wrong.append((name, raw[:40], error))
            assert len(worker.engine.added) == num_added, f"the engine has work for a wrong {name}"
    assert not wrong


WRONG: tuple[Any, ...] = (True, 7, 1.5, "x", [], ["x"], [1.5], {}, {"a": "b"}, {"a": 1}, [[]], [None], {"type": 3})


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_each_wrong_type_is_refused_with_the_fields_name(endpoint: str) -> None:
    wrong: list[object] = []
    async with listening() as url, aiohttp.ClientSession() as session:
        for name, _, hint in done_fields(endpoint):
            for value in WRONG:
                try:
                    msgspec.convert(value, hint, strict=True)
                except msgspec.ValidationError:
                    status, error = await post(session, url, endpoint, json.dumps({**BASES[endpoint], name: value}))
                    if (status, error.get("code")) not in (
                        (400, "invalid_type"),
                        (400, "unsupported"),
                        (400, "missing_field"),
                    ):
                        wrong.append((name, value, status, error))
                    elif not str(error["param"]).startswith(name) and error["code"] != "missing_field":
                        wrong.append((name, value, error))
    assert not wrong


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_field_that_is_not_done_is_never_ignored_in_silence(endpoint: str) -> None:
    wrong: list[object] = []
    async with listening() as url, aiohttp.ClientSession() as session:
        for name, (entry, _) in fields_of(KINDS[endpoint]).items():
            if entry.does is Done.YES:
                continue
            for value in (*entry.nothing, "x", 7, -0.5, True, ["x"], {"a": 1}):
                status, error = await post(session, url, endpoint, json.dumps({**BASES[endpoint], name: value}))
                asks = entry.does is Done.NO and not any(type(value) is type(n) and value == n for n in entry.nothing)
                if (status == 400) is not asks:
                    wrong.append((name, value, status))
                elif (asks and not (error["code"] == "unsupported" and error["param"] == name)) or (
                    asks and entry.meaning not in error["message"]
                ):
                    wrong.append((name, value, error))
        for name in ("temperature2", "x" * 300, "echo.", "größe"):
            status, error = await post(session, url, endpoint, json.dumps({**BASES[endpoint], name: None}))
            if (status, error.get("code"), error.get("param")) != (400, "unsupported", name):
                wrong.append((name, status, error))
    assert not wrong


def test_every_field_of_openais_client_and_of_vllm_is_in_the_table() -> None:
    completions, chat = fields_of(CompletionBody), fields_of(ChatBody)
    assert set(openai_completions.CompletionCreateParamsBase.__annotations__) <= set(completions)
    assert set(openai_chat.CompletionCreateParamsBase.__annotations__) <= set(chat)
    assert set(openai_stream_options.ChatCompletionStreamOptionsParam.__annotations__) <= set(fields_of(StreamOptions))
    assert not set(OF_VLLM) - (set(completions) & set(chat))


def test_equal_values_of_two_types_stay_apart() -> None:
    """False equals 0, and `Annotated` remembers what equals: each field has an entry of its own all the same."""
    chat = fields_of(ChatBody)
    assert [type(one) for one in chat["routed_experts_prompt_start"][0].nothing] == [type(None), int]
    assert [type(one) for one in chat["watermarking"][0].nothing] == [type(None), bool]
    assert len({id(entry) for entry, _ in chat.values()}) == len(chat)


def test_a_field_is_refused_on_both_endpoints_or_done_on_one_of_them() -> None:
    completions, chat = fields_of(CompletionBody), fields_of(ChatBody)
    for name in {*completions, *chat} - {"prompt", "messages"}:
        assert name in completions, name
        assert name in chat, name


@pytest.mark.parametrize(
    ("endpoint", "fields", "param", "part"),
    [
        ("completions", {"logit_bias": {"320": 1}}, "logit_bias", "token id 320: this model has ids 0 to 319"),
        ("completions", {"logit_bias": {"+1": 1}}, "logit_bias", "string of digits"),
        ("completions", {"logit_bias": {"1_0": 1}}, "logit_bias", "string of digits"),
        ("completions", {"logit_bias": {"\u0661": 1}}, "logit_bias", "string of digits"),
        ("completions", {"logit_bias": {"9" * 5000: 1}}, "logit_bias", "string of digits"),
        ("completions", {"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "send at most 1024"),
        ("completions", {"stop_token_ids": [320]}, "stop_token_ids", "token id 320"),
        ("completions", {"stop": ["a"] * 65}, "stop", "send at most 64"),
        ("completions", {"stop": ["a" * 1001]}, "stop", "at most 1000"),
        ("completions", {"stop": "a" * 1001}, "stop", "at most 1000"),
        ("completions", {"stop": ""}, "stop", "empty string"),
        ("completions", {"max_tokens": 4, "min_tokens": 5}, "min_tokens", "above max_tokens=4"),
        ("completions", {"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "differ"),
        ("completions", {"stream_options": {"x": 1}}, "stream_options.x", "not a field that kvferry knows"),
        ("completions", {"messages": []}, "messages", "is a field of /v1/chat/completions"),
        ("chat/completions", {"prompt": "x"}, "prompt", "is a field of /v1/completions"),
        ("completions", {"response_format": {"type": "json_object"}}, "response_format", "'json_object'"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format", "'json_object'"),
        ("chat/completions", {"top_logprobs": 3}, "top_logprobs", "needs logprobs=true"),
        ("completions", {"model": "m" * 5000}, "model", "at most 4096"),
        ("completions", {"prompt": [[1], []]}, "prompt", "list of 0 token ids"),
        ("completions", {"prompt": [[1], ["x"]]}, "prompt[1]", "Send a value of that type"),
        ("completions", {"prompt": [10**20]}, "prompt", "token id"),
        ("completions", {"prompt": [[320]]}, "prompt", "token id 320"),
        ("completions", {"kv_transfer_params": {"remote_port": 65536}}, "kv_transfer_params", "0 to 65535"),
        ("completions", {"kv_transfer_params": {"remote_port": 10**20}}, "kv_transfer_params", "out of range"),
        ("completions", {"kv_transfer_params": {"first_token": 10**20}}, "kv_transfer_params", "out of range"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_values_within_values(endpoint: str, fields: dict[str, Any], param: str, part: str) -> None:
    worker = ScriptedWorker()
    async with listening(worker, vocab_size=320) as url, aiohttp.ClientSession() as session:
        status, error = await post(session, url, endpoint, json.dumps({**BASES[endpoint], **fields}))
    assert status == 400, error
    assert str(error["param"]).startswith(param), error
    assert part in error["message"]
    assert worker.engine.added == []


async def test_every_event_of_a_stream_has_the_usage_if_the_client_asks() -> None:
    body = {"prompt": "Hi", "max_tokens": 3, "stream": True}
    async with listening() as url, aiohttp.ClientSession() as session:
        for options, expected in (
            ({"include_usage": True, "continuous_usage_stats": True}, [1, 2, 3, 3]),
            ({"include_usage": True}, [None, None, None, 3]),
            ({"continuous_usage_stats": True}, [None, None, None]),
        ):
            async with session.post(f"{url}/v1/completions", json={**body, "stream_options": options}) as response:
                lines = (await response.text()).strip().split("\n\n")[:-1]
            usages = [json.loads(line.removeprefix("data: ")).get("usage") for line in lines]
            assert [usage and usage["completion_tokens"] for usage in usages] == expected


def test_numbers_that_json_cannot_hold_are_no_numbers_of_the_table() -> None:
    """The bounds are finite: NaN and infinity are outside of each."""
    for kind in KINDS.values():
        for name, (entry, _) in fields_of(kind).items():
            if entry.low is not None and entry.high is not None:
                assert math.isfinite(entry.low), name
                assert math.isfinite(entry.high), name
                assert not entry.low <= math.nan <= entry.high
