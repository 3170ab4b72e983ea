"""Converts text to tokens and back by the model's own tokenizer.json and chat template; decodes token by token."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers
from jinja2 import nodes

from kvferry.engines.mini.models.token_table import TokenTable
from kvferry.errors import RequestError, RequestTooLong, UnknownModel
from kvferry.modelfiles import read_json

__all__ = ["Detokenizer", "Tokenizer"]

UNFINISHED = "\ufffd"
"""What decoding returns for the first bytes of a character whose last bytes are in later tokens."""
_LONG_TOKENS = 1000
_MESSAGES = ("messages", "message", "msg", "m")
"""What templates call the conversation, and one message of it."""
_WHOLE_MESSAGE = "message|tojson"


class Tokenizer:
    """A model's tokenizer and chat template. Thread-safe, because nothing in it changes."""

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any], chat_template: str | None) -> None:
        self._backend = backend
        self._table = TokenTable(backend)
        self._names = {
            name: value["content"] if isinstance(value, dict) else value
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (value := config.get(name)) is not None
        }
        self._template = _compile(chat_template) if chat_template else None
        self._names_read = _names_read(chat_template) if chat_template else frozenset[str]()
        eos = self._names.get("eos_token")
        self.eos_token_id: int | None = backend.token_to_id(eos) if eos else None

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Reads the files of a model. Raises UnknownModel if they are missing or damaged."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise UnknownModel(
                f"{file} is missing. Save the model with a fast tokenizer, or copy the file from elsewhere."
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more exact
            raise UnknownModel(f"{file} cannot be read as a tokenizer: {error}. Copy or download it again.") from error
        path = directory / "tokenizer_config.json"
        config = read_json(path) if path.is_file() else {}
        template = config.get("chat_template")
        jinja = directory / "chat_template.jinja"
        if jinja.is_file():
            template = jinja.read_text(encoding="utf-8")
        elif isinstance(template, list):  # several templates, each with a name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return cls(backend, config, template)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, including added ones. The model's matrices may have a few more rows."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works."""
        return self._template is not None

    def template_reads(self, name: str) -> bool:
        """Returns whether the chat template reads `tools`, or a field of a message, of this name."""
        return name in self._names_read or _WHOLE_MESSAGE in self._names_read

    @property
    def max_chars_per_token(self) -> int | None:
        """The most characters of a text that one token can cover; None if there is no such limit."""
        return self._table.max_chars

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Returns the tokens of a text. Special tokens in the text are recognised, as chat templates need.

        Raises RequestTooLong if there are more than `max_tokens`. Other threads run meanwhile.
        """
        # Of the library's calls only those for batches let other threads run: `encode` stops them all.
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        if max_tokens is not None and len(encoding) > max_tokens:
            raise RequestTooLong(
                f"the prompt has {len(encoding)} tokens, and at most {max_tokens} fit into the model's context: "
                "shorten the prompt, or serve with a larger --max-model-len"
            )
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of some tokens. Ids outside the vocabulary give no text."""
        ids = list(token_ids)
        if len(ids) > _LONG_TOKENS:  # as for `encode`
            return str(self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that one token adds to a text; none for special tokens, which a text leaves out."""
        return b"" if self._table.is_special(token_id) else self._table.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """Returns one token alone, for logprobs: its text, or `bytes:` and its bytes if those are no text."""
        raw = self._table.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns messages as the model's template writes them.

        Raises RequestError if the model has no template, or if its template refuses the messages.
        """
        if self._template is None:
            raise RequestError("this model has no chat template. Use /v1/completions, or a chat model.")
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self._names
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}") from error

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Returns the tokens of a conversation. The template writes all special ones. Raises as `render_chat`."""
        return self.encode(self.render_chat(messages, tools, add_generation_prompt), add_special_tokens=False)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    # A template is code that came with the model, so it runs in a sandbox, as in transformers.
    return jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )


def _names_read(source: str) -> frozenset[str]:
    """Returns every name, attribute and string of a template that compiles: it reads no field but these. If it writes
    whole messages as JSON, `_WHOLE_MESSAGE` is among them."""
    tree = _environment().parse(source)
    names = {node.name for node in tree.find_all(nodes.Name)} | {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    for written in tree.find_all(nodes.Filter):
        if written.name == "tojson" and isinstance(written.node, nodes.Name) and written.node.name in _MESSAGES:
            names.add(_WHOLE_MESSAGE)
    return frozenset(names)


def _compile(source: str) -> jinja2.Template:
    environment = _environment()

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UnknownModel(
            f"the model's chat template cannot be compiled: {error}. Copy or download the model again."
        ) from error


class Detokenizer:
    """Decodes one request's answer token by token.

    Decoding a token alone would lose spaces and split characters. So a short tail of tokens is decoded twice, without
    and with the new ones, and the difference is the new text. It is held back while it ends inside a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # A few tokens of the prompt are included, so that the first answer token keeps its leading space.
        self._tokens = list(prompt[-5:])
        self._start = 0
        self._read = len(self._tokens)

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes, which may be empty."""
        self._tokens.append(token_id)
        return self._advance(final=False)

    def finish(self) -> str:
        """Returns the text that is still held back, even if its last character is incomplete."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._tokens[self._start : self._read])
        after = self._tokenizer.decode(self._tokens[self._start :])
        if len(after) <= len(before) or (after.endswith(UNFINISHED) and not final):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return after[len(before) :]
