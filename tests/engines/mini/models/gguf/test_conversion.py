"""Converting GGUF files once per content, even with several processes at once; and each kind of bad file."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.engines.mini.models.catalog import model_directory
from kvferry.engines.mini.models.gguf import conversion
from kvferry.engines.mini.models.loading import load_model
from kvferry.engines.mini.settings import EngineSettings
from kvferry.errors import ConfigError, UnknownModel


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets KVFERRY_CACHE to a folder of the test."""
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def _write_gguf(path: Path, *, arch: str = "llama", seed: int = 0) -> None:
    import gguf
    import numpy as np

    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens = ["<eos>", "a", "b", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (4, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {"blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (48, 32), "blk.0.ffn_up": (48, 32)}
    shapes |= {"blk.0.ffn_down": (32, 48)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_directory_named_after_its_content(own_cache: Path, tmp_path: Path) -> None:
    one, copy, other = tmp_path / "m.gguf", tmp_path / "sub" / "m.gguf", tmp_path / "other" / "m.gguf"
    copy.parent.mkdir()
    other.parent.mkdir()
    _write_gguf(one)
    shutil.copy(one, copy)
    _write_gguf(other, seed=1)
    assert model_directory(str(one)) == model_directory(str(copy)) != model_directory(str(other))
    model = load_model(EngineSettings(model=str(one), dtype="float32"))
    assert model.config.tied_embeddings
    assert model.config.norm_eps == 1e-5
    assert model.tokenizer.encode("abba") == [3, 2, 1]
    assert model.config.eos_token_ids == (0,)
    assert sorted(path.name for path in own_cache.iterdir()) == sorted(
        {model_directory(str(one)).name, model_directory(str(other)).name}
    ), "no temporary directory is left"


def test_two_processes_convert_at_once(own_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    _write_gguf(file)
    code = f"from kvferry.engines.mini.models.catalog import model_directory; print(model_directory({str(file)!r}))"
    environment = {**os.environ, "KVFERRY_CACHE": str(own_cache.parent)}
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    found = {process.communicate(timeout=600)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(found) == 1
    assert [path.name for path in own_cache.iterdir()] == [Path(found.pop()).name]


def test_the_process_that_loses_the_race_uses_the_result_of_the_other(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.gguf"
    _write_gguf(file)
    convert = conversion._convert

    def slow(source: Path, out: Path) -> None:
        convert(source, out)
        target = out.parent / out.name[1:].rsplit(".", 1)[0]
        shutil.copytree(out, target)  # the other process is first

    monkeypatch.setattr(conversion, "_convert", slow)
    assert load_model(EngineSettings(model=str(file), dtype="float32")).config.num_layers == 1
    assert len(list(own_cache.iterdir())) == 1


def test_broken_and_foreign_gguf_files(own_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"not a gguf file")
    with pytest.raises(UnknownModel, match=r"m\.gguf' cannot be read as GGUF"):
        model_directory(str(file))
    _write_gguf(file)
    file.write_bytes(file.read_bytes()[:-4000])
    with pytest.raises(UnknownModel, match=r"m\.gguf' cannot be read as GGUF"):
        model_directory(str(file))
    _write_gguf(file, arch="mamba")
    with pytest.raises(UnknownModel, match="architecture 'mamba'"):
        model_directory(str(file))
    assert not list(own_cache.iterdir()), "nothing half-made is left"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    _write_gguf(file)
    (tmp_path / "taken").write_text("a file, not a folder")
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "taken"))
    with pytest.raises(ConfigError, match="Set KVFERRY_CACHE"):
        model_directory(str(file))
