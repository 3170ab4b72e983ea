"""The identity of a model, whatever its name."""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import UnknownModel
from kvferry.handshake.fingerprint import (
    MAX_TENSORS,
    model_fingerprint,
    tokenizer_fingerprint,
)
from kvferry.modelfiles import find_model

CONFIG = {"hidden_size": 8, "num_hidden_layers": 2, "rope_theta": 10000.0, "torch_dtype": "bfloat16"}


def tensors(seed: int = 0, num: int = 6, size: int = 4096) -> dict[str, bytes]:
    draw = np.random.default_rng(seed)
    return {f"layers.{i}.weight": draw.bytes(size) for i in range(num)}


def write_safetensors(path: Path, content: Mapping[str, bytes], metadata: str = "pt") -> None:
    header: dict[str, object] = {"__metadata__": {"format": metadata}}
    offset = 0
    for name, data in content.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(content.values()))


def checkpoint(
    root: Path,
    content: Mapping[str, bytes] | None = None,
    config: Mapping[str, object] | None = None,
    num_files: int = 1,
) -> Path:
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(config or CONFIG))
    (root / "tokenizer.json").write_text('{"vocab": {}}')
    content = tensors() if content is None else content
    names = list(content)
    for index in range(num_files):
        part = {name: content[name] for name in names[index::num_files]}
        write_safetensors(root / f"model-{index}.safetensors", part)
    return root


def test_copies_agree_however_they_are_split_into_files(tmp_path: Path) -> None:
    one = model_fingerprint(checkpoint(tmp_path / "a"))
    assert one.startswith("kf1-")
    assert model_fingerprint(checkpoint(tmp_path / "b", num_files=3)) == one


@pytest.mark.parametrize(
    "change",
    [
        {"_name_or_path": "somewhere/else"},
        {"transformers_version": "9.9"},
        {"torch_dtype": "float16"},
    ],
)
def test_keys_that_do_not_change_the_numbers_do_not_count(change: dict[str, object], tmp_path: Path) -> None:
    same = checkpoint(tmp_path / "b", config={**CONFIG, **change})
    assert model_fingerprint(checkpoint(tmp_path / "a")) == model_fingerprint(same)


def test_other_weights_other_config_other_names_differ(tmp_path: Path) -> None:
    renamed = {name.replace("weight", "w"): data for name, data in tensors().items()}
    fewer = dict(list(tensors().items())[:-1])
    places = [
        checkpoint(tmp_path / "same"),
        checkpoint(tmp_path / "weights", tensors(seed=1)),
        checkpoint(tmp_path / "config", config={**CONFIG, "rope_theta": 500000.0}),
        checkpoint(tmp_path / "renamed", renamed),
        checkpoint(tmp_path / "fewer", fewer),
    ]
    assert len({model_fingerprint(place) for place in places}) == len(places)


def test_one_tensor_that_was_trained_further_is_detected(tmp_path: Path) -> None:
    trained = {**tensors(), "layers.3.weight": np.random.default_rng(9).bytes(4096)}
    assert model_fingerprint(checkpoint(tmp_path / "a")) != model_fingerprint(checkpoint(tmp_path / "b", trained))


def test_little_is_read_of_a_large_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers and samples only: what is read does not grow with the tensors' size."""
    read: list[int] = []
    pread = os.pread

    def counting(descriptor: int, length: int, offset: int) -> bytes:
        read.append(length)
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", counting)
    model_fingerprint(checkpoint(tmp_path / "a", tensors(size=1 << 20)))
    assert sum(read) == 6 * 2 * 64


def test_of_very_many_tensors_some_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num = MAX_TENSORS + 500
    read: list[int] = []
    pread = os.pread

    def counting(descriptor: int, length: int, offset: int) -> bytes:
        read.append(length)
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", counting)
    one = model_fingerprint(checkpoint(tmp_path / "a", tensors(num=num, size=16)))
    assert len(read) == MAX_TENSORS
    assert model_fingerprint(checkpoint(tmp_path / "b", tensors(num=num, size=16), num_files=2)) == one


def test_a_path_and_a_hub_name_agree(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    os.environ["HF_HUB_CACHE"] = str(hub)
    home = hub / "models--org--model"
    checkpoint(home / "snapshots" / "abc123")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc123\n")
    try:
        found = find_model("org/model")
        assert found == home / "snapshots" / "abc123"
        copy = checkpoint(tmp_path / "copy")
        assert model_fingerprint(found) == model_fingerprint(copy)
        assert tokenizer_fingerprint(found) == tokenizer_fingerprint(copy)
    finally:
        del os.environ["HF_HUB_CACHE"]


def test_the_chat_template_counts_for_the_tokenizer(tmp_path: Path) -> None:
    a, b = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    assert tokenizer_fingerprint(a) == tokenizer_fingerprint(b)
    (b / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}"}')
    assert tokenizer_fingerprint(a) != tokenizer_fingerprint(b)
    assert model_fingerprint(a) == model_fingerprint(b)
    (tmp_path / "empty").mkdir()
    assert tokenizer_fingerprint(tmp_path / "empty") is None


@pytest.mark.parametrize("suffix", ["gguf", "bin"])
def test_files_that_are_not_read(suffix: str, tmp_path: Path) -> None:
    data = bytearray(np.random.default_rng(0).bytes(3 << 20))
    (tmp_path / f"a.{suffix}").write_bytes(data)
    (tmp_path / f"b.{suffix}").write_bytes(data)
    one = model_fingerprint(tmp_path / f"a.{suffix}")
    assert model_fingerprint(tmp_path / f"b.{suffix}") == one
    data[5] ^= 1
    (tmp_path / f"b.{suffix}").write_bytes(data)
    assert model_fingerprint(tmp_path / f"b.{suffix}") != one
    assert (tokenizer_fingerprint(tmp_path / f"a.{suffix}") is None) is (suffix == "bin")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:4],
        lambda data: data[:200],
        lambda data: data[:-1],
        lambda data: struct.pack("<Q", 1 << 60) + data[8:],
        lambda data: data[:8] + b"[" + data[9:],
        lambda data: data.replace(b'"data_offsets": [0,', b'"data_offsets": [9999999,', 1),
    ],
)
def test_a_broken_file_is_reported(damage: object, tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "a")
    file = root / "model-0.safetensors"
    assert callable(damage)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UnknownModel, match="Copy or download it again"):
        model_fingerprint(root)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="holds no weights"):
        model_fingerprint(tmp_path)
