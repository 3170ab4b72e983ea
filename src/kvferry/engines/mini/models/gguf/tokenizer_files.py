"""Converts the tokenizer of a GGUF file into Hugging Face's tokenizer.json and tokenizer_config.json."""

from pathlib import Path
from typing import Any

from kvferry.errors import UnknownModel

__all__ = ["tokenizer", "tokenizer_config"]

CONTROL, USER_DEFINED = 3, 4
"""The numbers of two token types in GGUF."""
SPACE = "\u2581"
"""The character that SentencePiece writes for a space."""
BPE = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
# How text is split before byte-pair merging, by the name of the method in GGUF.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")


def _split(pattern: str) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    ]


PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
    "qwen2": _split(_QWEN),
    "llama-bpe": _split(_LLAMA3),
}


def tokenizer(file: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of tokenizer.json. Raises UnknownModel for an unsupported kind of tokenizer."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind == "gpt2" and pre in PRE_TOKENIZERS:
        return _byte_level(fields, str(pre))
    if kind == "llama" and fields["general.architecture"] == "gemma3":
        return _sentence_piece(fields)
    known = ", ".join(PRE_TOKENIZERS)
    raise UnknownModel(
        f"{str(file)!r} has a tokenizer of kind {kind!r} {pre!r}. Supported: gpt2 with {known}, and Gemma 3's. "
        "Use the Hugging Face directory of the model."
    )


def _added(fields: dict[str, Any]) -> list[dict[str, Any]]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    return [
        {"id": i, "content": tokens[i], "special": t == CONTROL, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for i, t in enumerate(types)
        if t in (CONTROL, USER_DEFINED) and tokens[i].strip(" ")
    ]


def _byte_level(fields: dict[str, Any], pre: str) -> dict[str, Any]:
    """Byte-pair encoding over characters that stand for bytes; the merges are in the file."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(fields),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            **BPE,
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])},
            "merges": [merge.split(" ", 1) for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _sentence_piece(fields: dict[str, Any]) -> dict[str, Any]:
    """Byte-pair encoding with merges that are worked out from the pieces, which come in the order of their scores.

    SentencePiece always joins the pair that gives the best piece. So every way to make a piece of two others is a
    merge, in the order of the pieces.
    """
    # Runs of spaces are pieces like others: spaces are replaced by SPACE before the text is split.
    tokens: list[str] = [token.replace(" ", SPACE) for token in fields["tokenizer.ggml.tokens"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    bos = tokens[fields["tokenizer.ggml.bos_token_id"]]
    merges = [
        [token[:cut], token[cut:]]
        for token in tokens
        for cut in reversed(range(1, len(token)))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(fields),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, text] if fields.get("tokenizer.ggml.add_bos_token") else [text],
            "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [vocab[bos]], "tokens": [bos]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            **BPE,
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of tokenizer_config.json."""
    tokens = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "model_max_length": fields.get(f"{fields['general.architecture']}.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config
