"""What each token of a tokenizer stands for in a text: its bytes, and how many characters one token can cover.

Two kinds of vocabulary are known. In a byte-level one (GPT-2, Llama 3, Qwen) every byte is written as one letter of an
alphabet of 256. In a SentencePiece one (Llama 2, Gemma) a token is text with U+2581 for a space, or `<0xNN>` for one
byte. Tokens of any other kind have the bytes of the text that they decode to.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

import tokenizers

__all__ = ["TokenTable"]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_COMPOSED = 4
"""The most characters that Unicode composition (NFC, NFKC) makes one of."""
_KEEP_ALL = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "UnicodeScripts"})
"""Pre-tokenizers that only cut a text, or write its characters in another way."""


class TokenTable:
    """The tokens of one tokenizer. Thread-safe, because nothing in it changes."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        decoders = _parts(backend.decoder)
        kinds = {part["type"] for part in decoders}
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else {}
        self._has_bytes = "ByteFallback" in kinds
        self._spaces = [replaced for part in decoders if (replaced := _replaced_by_space(part))]
        self.max_chars: int | None = _max_chars(backend)
        """The most characters of a text that one token can cover; None if there is no such limit."""

    def bytes_of(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text that shows special tokens; none for an id without a token."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet:  # a token with another letter is an added one, which stands for itself
            found = [self._alphabet.get(letter) for letter in token]
            return token.encode() if None in found else bytes(byte for byte in found if byte is not None)
        if self._has_bytes and (match := _BYTE.fullmatch(token)):
            return bytes((int(match[1], 16),))
        if self._spaces:
            for replaced in self._spaces:
                token = token.replace(replaced, " ")
            return token.encode()
        return str(self._backend.decode([token_id], skip_special_tokens=False)).encode()

    def is_special(self, token_id: int) -> bool:
        """Whether a text leaves this token out."""
        return token_id in self._special


def _parts(component: Any) -> list[dict[str, Any]]:
    """Returns the settings of a tokenizer's component, or of each part of a sequence of them."""
    if component is None:
        return []
    settings = json.loads(component.__getstate__())
    for name in ("decoders", "normalizers", "pretokenizers"):
        if name in settings:
            return [part for part in settings[name] if isinstance(part, dict)]
    return [settings]


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte for which each letter of a byte-level vocabulary stands: printable ones for themselves, and
    those from U+0100 on for the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _replaced_by_space(part: dict[str, Any]) -> str:
    """Returns what this decoder turns into a space, or an empty text."""
    if part["type"] == "Metaspace":
        return str(part.get("replacement", "▁"))
    if part["type"] == "Replace" and part.get("content") == " ":
        return str(part.get("pattern", {}).get("String", ""))
    return ""


def _max_chars(backend: tokenizers.Tokenizer) -> int | None:
    """Returns how many characters one token can cover at most, if no step before the vocabulary drops characters."""
    normalizers, cutters = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
    added = backend.get_added_tokens_decoder().values()
    covers_all = _covers_every_character(backend.model) or any(part["type"] == "ByteLevel" for part in cutters)
    if (
        not covers_all
        or backend.truncation is not None
        or any(token.lstrip or token.rstrip for token in added)
        or not all(part["type"] in _KEEP_ALL or _cuts_only(part) for part in cutters)
        or not all(_keeps_length(part) for part in normalizers)
    ):
        return None
    composes = any(part["type"] in ("NFC", "NFKC") for part in normalizers)
    return _longest(backend.get_vocab(with_added_tokens=True)) * (_COMPOSED if composes else 1)


def _covers_every_character(model: Any) -> bool:
    if type(model).__name__ != "BPE":
        return False  # others write a whole unknown word as one token
    return bool(model.byte_fallback or (model.unk_token is not None and not model.fuse_unk))


def _cuts_only(part: dict[str, Any]) -> bool:
    return part["type"] == "Split" and part.get("behavior") != "Removed"


def _keeps_length(part: dict[str, Any]) -> bool:
    """Whether a normalizer leaves at least one character of each that it reads, up to composition."""
    if part["type"] == "Replace":
        pattern = part.get("pattern", {}).get("String")
        return pattern is not None and len(part.get("content", "")) >= len(pattern)
    return part["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Prepend", "Lowercase", "ByteLevel")


def _longest(tokens: Iterable[str]) -> int:
    return max(map(len, tokens), default=1)
