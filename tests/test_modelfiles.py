"""Models are found by path, by the name of one that comes with kvferry, or in the local hub cache."""

import json
import struct
from pathlib import Path

import pytest

import kvferry_models
from kvferry.errors import UnknownModel
from kvferry.modelfiles import BUNDLED, find_model, read_json, read_safetensors_header, smollm2_file


def test_every_model_of_the_distribution_is_found() -> None:
    assert BUNDLED == kvferry_models.NAMES
    for name in kvferry_models.NAMES:
        directory = find_model(name)
        assert directory == kvferry_models.directory(name)
        assert read_json(directory / "config.json")["architectures"]
        assert read_safetensors_header(directory / "model.safetensors")


def test_the_directory_of_an_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="byte-mtp-huge"):
        kvferry_models.directory("byte-mtp-huge")


@pytest.mark.parametrize("name", kvferry_models.NAMES)
def test_without_the_distribution_the_error_names_the_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(UnknownModel, match=rf"'{name}' needs the package kvferry-models.*pip install .*\./models"):
        find_model(name)


def test_smollm2_is_found_as_a_file() -> None:
    assert find_model("smollm2") == smollm2_file()
    assert smollm2_file().suffix == ".gguf"


def test_a_hub_name_is_found_by_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--org--model"
    (home / "snapshots" / "abc123").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc123\n")
    assert find_model("org/model") == find_model("org/model", "abc123") == home / "snapshots" / "abc123"
    with pytest.raises(UnknownModel, match=rf"at 'org/model'.*\(revision 'v2'\) in the hub cache '{tmp_path}'"):
        find_model("org/model", "v2")
    with pytest.raises(UnknownModel):
        find_model("org/model", "../../../..")


def _write(file: Path, header: object, num_data_bytes: int) -> Path:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_data_bytes))
    return file


def test_the_header_says_where_each_tensor_lies(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "b": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
    }
    file = _write(tmp_path / "m.safetensors", header, 16)
    a, b = read_safetensors_header(file)
    assert (a.name, a.dtype, a.shape, a.num_bytes) == ("a", "BF16", (2, 3), 12)
    assert (b.shape, b.start, b.stop) == ((), a.stop, file.stat().st_size)


@pytest.mark.parametrize(
    ("offsets", "num_data_bytes", "message"),
    [
        ([0, 4], 3, "bytes long, and its header says"),
        ([0, 4], 5, "bytes long, and its header says"),
        ([4, 0], 4, "corrupt safetensors header.*'a' has the data_offsets 4 and 0"),
        ([-8, 4], 4, "corrupt safetensors header"),
        (None, 4, "corrupt safetensors header"),
    ],
)
def test_a_header_that_does_not_fit_the_file_is_refused(
    tmp_path: Path, offsets: list[int] | None, num_data_bytes: int, message: str
) -> None:
    header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}
    file = _write(tmp_path / "m.safetensors", header, num_data_bytes)
    with pytest.raises(UnknownModel, match=message):
        read_safetensors_header(file)
