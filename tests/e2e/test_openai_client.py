"""openai-python against a router with real workers: each parameter that the client has is done, or is a 400 for it.

The parameters are read from the client's own `create`, so a new release of it fails here until each new one is in a
table below.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pydantic
import pytest

from tests.harness.fleet import Fleet, pair
from tests.harness.tiny_model import make_tiny_model

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(300)]

FLAGS = ("--dtype", "float32", "--num-blocks", "256", "--threads", "1", "--verify", "all")
OF_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
"""Arguments of the client's methods that are no fields of a body."""
MODEL = "model"
PROMPT = "a ferry carries people across a river, and the other bank has a bakery"
NUM_TOKENS = 24
MESSAGES = [{"role": "user", "content": PROMPT}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SAMPLED = {"temperature": 1.0, "seed": 7}


@dataclass
class Answer:
    """One answer, streamed or not."""

    texts: dict[int, str] = field(default_factory=dict)
    """The text of each choice."""
    num_logprobs: int = 0
    """Tokens with log probabilities."""
    num_likeliest: int = 0
    """Entries of the first token that has any."""
    usage: Any = None
    num_chunks: int = 0
    """Chunks of a stream; 0 for an answer that came whole."""

    @property
    def text(self) -> str:
        return self.texts[0]


@pytest.fixture(scope="module", params=["pull", "push"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp(request.param)
    with pair(directory, *FLAGS, model=str(make_tiny_model(directory / "llama")), mode=request.param) as fleet:
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def create(client: openai.OpenAI, chat: bool) -> Callable[..., Any]:
    return client.chat.completions.create if chat else client.completions.create


def ask(client: openai.OpenAI, chat: bool, stream: bool, fields: dict[str, Any]) -> Answer:
    """Returns the answer to a greedy request of NUM_TOKENS tokens with these fields."""
    asked = {"model": MODEL, "temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}, **fields}
    asked.setdefault("messages" if chat else "prompt", MESSAGES if chat else PROMPT)
    got = create(client, chat)(**asked, stream=stream)
    answer = Answer()
    for part in got if stream else [got]:
        answer.num_chunks += stream
        answer.usage = part.usage or answer.usage
        for choice in part.choices:
            text = (choice.delta if stream else choice.message).content if chat else choice.text
            answer.texts[choice.index] = answer.texts.get(choice.index, "") + (text or "")
            if choice.logprobs is not None:
                tops = [one.top_logprobs for one in choice.logprobs.content] if chat else choice.logprobs.top_logprobs
                answer.num_logprobs += len(tops or (() if chat else choice.logprobs.tokens))
                answer.num_likeliest = answer.num_likeliest or len((tops or [()])[0])
    return answer


Holds = Callable[[Answer, Answer], bool]
"""Whether an answer with the field, and one without it, show that the field was done."""


def same(answer: Answer, plain: Answer) -> bool:
    return answer.texts == plain.texts


def differs(answer: Answer, plain: Answer) -> bool:
    return answer.text != plain.text


def in_length(answer: Answer, plain: Answer) -> bool:
    return bool(answer.usage.completion_tokens == 3 and plain.text.startswith(answer.text))


DONE: dict[str, tuple[dict[str, Any], Holds]] = {
    "model": ({"model": MODEL}, same),
    "n": ({"n": 3}, lambda answer, plain: answer.texts == dict.fromkeys(range(3), plain.text)),
    "stop": ({"stop": None}, lambda answer, plain: answer.text == plain.text[: plain.text.index(plain.text[5:7])]),
    "seed": ({"seed": 7, "temperature": 1.0}, differs),
    "temperature": ({"temperature": 1.5, "seed": 7}, differs),
    "top_p": ({"temperature": 5.0, "top_p": 1e-9}, same),
    "frequency_penalty": ({"frequency_penalty": 2.0}, differs),
    "presence_penalty": ({"presence_penalty": 2.0}, differs),
    "logit_bias": ({"logit_bias": {"68": 100}}, lambda answer, _: len(set(answer.text)) == 1),
    "max_tokens": ({"max_tokens": 3, "stream_options": {"include_usage": True}}, in_length),
    "stream_options": (
        {"stream_options": {"include_usage": True, "include_obfuscation": False}},
        lambda answer, plain: same(answer, plain) and answer.usage.completion_tokens == NUM_TOKENS,
    ),
    "user": ({"user": "u"}, same),
}
"""Fields of both endpoints that are done, or change no answer."""
DONE_OF_COMPLETIONS: dict[str, tuple[dict[str, Any], Holds]] = {
    "prompt": ({"prompt": [PROMPT, PROMPT]}, lambda answer, plain: answer.texts == {0: plain.text, 1: plain.text}),
    "echo": ({"echo": True}, lambda answer, plain: answer.text == PROMPT + plain.text),
    "logprobs": ({"logprobs": 2}, lambda answer, _: (answer.num_logprobs, answer.num_likeliest) == (NUM_TOKENS, 2)),
}
DONE_OF_CHAT: dict[str, tuple[dict[str, Any], Holds]] = {
    "messages": ({"messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]}, same),
    "logprobs": ({"logprobs": True}, lambda answer, _: (answer.num_logprobs, answer.num_likeliest) == (NUM_TOKENS, 0)),
    "top_logprobs": (
        {"logprobs": True, "top_logprobs": 2},
        lambda answer, _: (answer.num_logprobs, answer.num_likeliest) == (NUM_TOKENS, 2),
    ),
    "max_completion_tokens": ({"max_completion_tokens": 3, "stream_options": {"include_usage": True}}, in_length),
    "response_format": ({"response_format": {"type": "text"}}, same),
    "metadata": ({"metadata": {"a": "b"}}, same),
    "parallel_tool_calls": ({"parallel_tool_calls": False}, same),
    "prompt_cache_key": ({"prompt_cache_key": "k"}, same),
    "prompt_cache_options": ({"prompt_cache_options": {}}, same),
    "prompt_cache_retention": ({"prompt_cache_retention": "24h"}, same),
    "safety_identifier": ({"safety_identifier": "s"}, same),
    "service_tier": ({"service_tier": "auto"}, same),
}
REFUSED_OF_COMPLETIONS: dict[str, dict[str, Any]] = {"best_of": {"best_of": 3}, "suffix": {"suffix": "x"}}
REFUSED_OF_CHAT: dict[str, dict[str, Any]] = {
    "audio": {"audio": {"voice": "alloy", "format": "wav"}},
    "function_call": {"function_call": "auto"},
    "functions": {"functions": [{"name": "weather"}]},
    "modalities": {"modalities": ["text", "audio"]},
    "moderation": {"moderation": {"model": "m"}},
    "prediction": {"prediction": {"type": "content", "content": "x"}},
    "reasoning_effort": {"reasoning_effort": "low"},
    "response_format": {"response_format": {"type": "json_object"}},
    "store": {"store": True},
    "tool_choice": {"tool_choice": "required"},
    "tools": {"tools": [TOOL]},
    "verbosity": {"verbosity": "low"},
    "web_search_options": {"web_search_options": {}},
}
both_endpoints = pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@both_endpoints
def test_every_parameter_of_the_client_is_in_a_table(client: openai.OpenAI, chat: bool) -> None:
    parameters = set(inspect.signature(create(client, chat)).parameters) - OF_CLIENT - {"stream"}
    own = (DONE_OF_CHAT, REFUSED_OF_CHAT) if chat else (DONE_OF_COMPLETIONS, REFUSED_OF_COMPLETIONS)
    assert parameters == {name for table in (DONE, *own) for name in table}


@both_endpoints
@streamed_or_not
def test_what_is_done_shows_in_the_answer(client: openai.OpenAI, chat: bool, stream: bool) -> None:
    plain = ask(client, chat, stream, {})
    assert plain.num_chunks > 1 or not stream
    wrong = {}
    for name, (fields, holds) in {**DONE, **(DONE_OF_CHAT if chat else DONE_OF_COMPLETIONS)}.items():
        if name == "stop":
            fields = {"stop": [plain.text[5:7]]}  # of this answer
        if not stream:
            fields = {one: value for one, value in fields.items() if one != "stream_options"}
        answer = ask(client, chat, stream, fields)
        if not holds(answer, plain):
            wrong[name] = answer
    assert not wrong, plain


@both_endpoints
@streamed_or_not
def test_what_is_not_done_is_a_bad_request_that_names_it(client: openai.OpenAI, chat: bool, stream: bool) -> None:
    for name, fields in (REFUSED_OF_CHAT if chat else REFUSED_OF_COMPLETIONS).items():
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, chat, stream, fields)
        assert refused.value.param == name
        assert refused.value.code == ("unsupported" if name != "tools" else None)
        assert refused.value.type == "invalid_request_error"
    for fields, param, code in (
        ({"temperature": 101}, "temperature", "out_of_range"),
        ({"temperature": "warm"}, "temperature", "invalid_type"),
        ({"max_tokens": 100_000}, "messages" if chat else "prompt", "context_length_exceeded"),
        ({"extra_body": {"min_tokens": 99}}, "min_tokens", None),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field", "unsupported"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, chat, stream, fields)
        assert (refused.value.param, refused.value.code) == (param, code)


@both_endpoints
def test_the_same_seed_gives_the_same_answers(client: openai.OpenAI, chat: bool) -> None:
    first, again = (ask(client, chat, stream, {**SAMPLED, "n": 2}) for stream in (False, True))
    assert first.texts == again.texts
    assert first.texts[0] != first.texts[1]
    assert ask(client, chat, False, {**SAMPLED, "seed": 8}).text != first.text


@both_endpoints
@streamed_or_not
def test_another_model_is_not_found(client: openai.OpenAI, chat: bool, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        ask(client, chat, stream, {"model": "gpt-9"})
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-9")
    assert refused.value.code == "model_not_found"


class Weather(pydantic.BaseModel):
    """An answer that a client would have parsed."""

    degrees: float


def test_the_clients_helpers_for_streams_and_for_parsed_answers(client: openai.OpenAI) -> None:
    messages: Any = MESSAGES
    stop = ask(client, True, False, {}).text[8:10]
    plain = ask(client, True, False, {"stop": stop})
    with client.chat.completions.stream(
        model=MODEL, messages=messages, max_tokens=NUM_TOKENS, temperature=0, stop=stop, extra_body={"ignore_eos": True}
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content == plain.text
    assert final.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.parse(model=MODEL, messages=messages, response_format=Weather)
    assert refused.value.param == "response_format"


@both_endpoints
def test_a_stream_that_the_client_closes_frees_every_block(fleet: Fleet, client: openai.OpenAI, chat: bool) -> None:
    prompt: dict[str, Any] = {"messages": MESSAGES} if chat else {"prompt": PROMPT}
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 1500, "extra_body": {"ignore_eos": True}, **prompt}
    with create(client, chat)(**asked, stream=True) as stream:
        for _ in stream:
            break
    fleet.wait_blocks_free()


def test_an_answer_is_sent_back_in_the_next_turn(client: openai.OpenAI) -> None:
    """As clients do: the null fields of the client's own message ask for nothing."""
    messages: Any = MESSAGES
    first = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    turns: Any = [*MESSAGES, first.choices[0].message.model_dump(), {"role": "user", "content": "and then?"}]
    second = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=4)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
