"""Text from tokens: complete characters, spaces, stop strings across tokens, chat templates."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engines.mini.api import FinishReason, SamplingParams
from kvferry.engines.mini.models.tokenizer import Detokenizer, Tokenizer
from kvferry.engines.mini.scheduling.output import Answer, Finish
from kvferry.errors import RequestError, UnknownModel
from tests.harness.hypothesis_profile import examples
from tests.harness.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer: every character beyond ASCII is several tokens."""
    return Tokenizer.from_directory(make_tiny_model(tmp_path_factory.mktemp("text") / "m"))


@settings(max_examples=examples(100))
@given(text=st.text(max_size=40))
def test_pieces_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + detokenizer.finish() == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_only_complete_characters_come_out(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in tokenizer.encode("é🙂x")]
    assert [piece for piece in pieces if piece] == ["é", "🙂", "x"]


def test_half_a_character_at_the_end_is_shown_when_it_ends(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in tokenizer.encode("🙂")[:2]] == ["", ""]
    assert detokenizer.finish() == "\ufffd"


def test_the_first_word_keeps_its_space(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("over"))
    assert "".join(detokenizer.push(token) for token in tokenizer.encode(" the")) == " the"


def test_special_tokens_are_recognised_and_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.token_text(1) == "<|im_start|>"


# Answers


def _run(tokenizer: Tokenizer, tokens: list[int], **sampling: Any) -> tuple[list[str], Finish | None]:
    params = SamplingParams(**{"max_tokens": 100, **sampling})
    answer = Answer(params, Detokenizer(tokenizer), frozenset((0,)), params.max_tokens)
    pieces, finish = [], None
    for token in tokens:
        finish = answer.push(token, None)
        pieces.append(answer.take()[1])
        if finish:
            break
    return pieces, finish


def test_text_that_may_become_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    pieces, finish = _run(tokenizer, tokenizer.encode("xENxEND"), stop=("END",))
    assert pieces == ["x", "", "", "ENx", "", "", ""]
    assert finish == Finish(FinishReason.STOP, "END")


def test_held_back_text_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    pieces, finish = _run(tokenizer, tokenizer.encode("xEN"), stop=("END",), max_tokens=3)
    assert "".join(pieces) == "xEN"
    assert finish == Finish(FinishReason.LENGTH)


def test_the_first_of_several_stop_strings_wins(tokenizer: Tokenizer) -> None:
    pieces, finish = _run(tokenizer, tokenizer.encode("one two three"), stop=("three", "two", "o t"))
    assert finish is not None
    assert ("".join(pieces), finish.stop) == ("one tw", "o t") or ("".join(pieces), finish.stop) == ("one ", "two")


@settings(max_examples=examples(150))
@given(
    text=st.text(alphabet="abé", max_size=14),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3),
)
def test_no_stop_string_is_ever_seen_and_no_text_is_lost(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    tokens = tokenizer.encode(text)
    if not tokens:
        return
    pieces, finish = _run(tokenizer, tokens, stop=tuple(stops), max_tokens=len(tokens))
    shown = "".join(pieces)
    assert finish is not None
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if finish.reason is FinishReason.LENGTH:
        assert shown == text
    else:
        assert isinstance(finish.stop, str)
        assert text[len(shown) :].startswith(finish.stop)


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    pieces, finish = _run(tokenizer, tokenizer.encode("axbxc"), stop=("x",), min_tokens=3)
    assert "".join(pieces) == "axb"
    assert finish == Finish(FinishReason.STOP, "x")


def test_the_end_token_has_no_text_and_no_stop_reason(tokenizer: Tokenizer) -> None:
    pieces, finish = _run(tokenizer, [*tokenizer.encode("ab"), 0])
    assert ("".join(pieces), finish) == ("ab", Finish(FinishReason.STOP))
    pieces, finish = _run(tokenizer, [0, *tokenizer.encode("ab")], ignore_eos=True, max_tokens=3)
    assert ("".join(pieces), finish) == ("ab", Finish(FinishReason.LENGTH))


# Chat


def test_chat_is_written_by_the_models_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages) == text
    assert tokenizer.apply_chat_template(messages) == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.render_chat(messages, add_generation_prompt=False).endswith("hi<|im_end|>\n")
    assert not tokenizer.template_reads("tools")


def _with_template(tmp_path: Path, template: object) -> Tokenizer:
    directory = make_tiny_model(tmp_path / "m")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return Tokenizer.from_directory(directory)


def test_the_fields_that_a_template_reads_are_known(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}{% if 'name' in m %}{{ m['title'] }}{% endif %}{{ m.get('calls') }}"
        "{% endfor %}"
    )
    tokenizer = _with_template(tmp_path, template)
    assert all(tokenizer.template_reads(name) for name in ("role", "name", "title", "calls"))
    assert not any(tokenizer.template_reads(name) for name in ("tools", "tool_calls", "titl", "el"))
    assert _with_template(tmp_path, "{{ messages | tojson }}").template_reads("anything")


def test_a_model_without_a_template_is_reported(tmp_path: Path) -> None:
    tokenizer = _with_template(tmp_path, None)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_a_template_may_refuse(tmp_path: Path) -> None:
    tokenizer = _with_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_a_template_from_the_hub_cannot_reach_python(tmp_path: Path) -> None:
    tokenizer = _with_template(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError, match="chat template refuses"):
        tokenizer.render_chat([])


def test_a_broken_template_is_found_when_loading(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="cannot be compiled"):
        _with_template(tmp_path, "{% for %}")


def test_several_templates_and_a_template_in_a_separate_file(tmp_path: Path) -> None:
    many = _with_template(
        tmp_path / "a", [{"name": "default", "template": "D{{ tools }}"}, {"name": "x", "template": ""}]
    )
    assert many.render_chat([]) == "DNone"
    assert many.template_reads("tools")
    directory = make_tiny_model(tmp_path / "b" / "m")
    (directory / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert Tokenizer.from_directory(directory).render_chat([]) == "file <eos>"
