"""Keys and values in formats other than the model computes in: what is stored and read, and what peers receive."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.engines.mini.cache.pages import LayerPages
from kvferry.engines.mini.cache.pool import KVCache
from kvferry.engines.mini.engine import Engine
from kvferry.engines.mini.models.cache_spec import make_groups
from kvferry.engines.mini.models.catalog import read_config
from kvferry.engines.mini.models.kv_format import KvFormat
from kvferry.engines.mini.models.loading import kv_format
from kvferry.engines.mini.ranks.build import build_executor
from kvferry.engines.mini.settings import EngineSettings
from kvferry.engines.mini.worker import WorkerSettings, describe
from kvferry.errors import ConfigError, UnknownModel
from kvferry.handshake.facts import Facts
from kvferry.handshake.verdict import verdict
from tests.engines.mini.conftest import ask, finish, prompt_of, tokens_of
from tests.harness.tiny_model import make_tiny_model

SLOTS = (torch.tensor([2, 1, 2]), torch.tensor([0, 3, 1]))
"""The blocks and places of three tokens."""


def _pages(kv: KvFormat, *, latent: bool = False) -> LayerPages:
    layer = kv.latent("layers.0.attn", 16) if latent else kv.attention("layers.0.attn", (2, 0, 2), 16)
    cache = KVCache([layer], make_groups([layer]), num_blocks=4, block_tokens=4, device="cpu")
    return LayerPages(cache, "layers.0.attn", torch.float32)


def _read(pages: LayerPages) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.tensor([[0, 1, 2, 3]])
    keys, values = pages.gather(pages.rows_of(blocks), blocks)
    at = SLOTS[0] * 4 + SLOTS[1]
    return keys[0, :, at].transpose(0, 1), values[0, :, at].transpose(0, 1)


@pytest.mark.parametrize("latent", [False, True], ids=["keys and values", "latents"])
@pytest.mark.parametrize(
    ("kv", "error"),
    [
        (KvFormat(torch.float32), 0.0),
        (KvFormat(torch.bfloat16), 2**-8),
        (KvFormat(torch.float8_e4m3fn), 2**-4),
        (KvFormat(torch.float8_e4m3fn, scales={"layers.0.attn": (0.25, 0.5)}), 2**-4),
        (KvFormat(torch.float8_e4m3fn, per_token=True), 2**-4),
    ],
    ids=["fp32", "bf16", "fp8", "fp8 with scales", "fp8 by token"],
)
def test_stored_values_are_read_back_and_are_close_to_the_original(kv: KvFormat, error: float, latent: bool) -> None:
    pages = _pages(kv, latent=latent)
    given = tuple(torch.randn(3, 1 if latent else 2, 16) * 20 for _ in range(1 if latent else 2))
    returned = pages.store(given, SLOTS)
    read = _read(pages)
    for x, stored, found in zip(given, returned, read, strict=False):
        assert torch.equal(stored, found)
        assert (found - x).abs().max() <= error * x.abs().max()


def test_a_scale_makes_room_for_large_values() -> None:
    large = (torch.full((3, 2, 16), 3000.0),) * 2
    for kv, want in (
        (KvFormat(torch.float8_e4m3fn), 448.0),
        (KvFormat(torch.float8_e4m3fn, scales={"layers.0.attn": (8.0, 8.0)}), 3072.0),
        (KvFormat(torch.float8_e4m3fn, per_token=True), 3000.0),
    ):
        pages = _pages(kv)
        pages.store(large, SLOTS)
        for found in _read(pages):
            assert found.mean().item() == pytest.approx(want, rel=1e-3)


@pytest.mark.engine
@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e4m3_token"])
def test_chunks_and_prefix_hits_change_no_token(tmp_path: Path, family: str, kv_dtype: str) -> None:
    # A chunk must see its own tokens as later chunks will: as they were stored.
    directory = make_tiny_model(tmp_path / "model", family)
    answers = []
    for chunk in (7, 128):
        settings = EngineSettings(
            model=str(directory), dtype="float32", kv_dtype=kv_dtype, num_blocks=64, max_batch_tokens=chunk
        )
        engine = Engine(*build_executor(settings), settings)
        for name in ("first", "again"):
            engine.add(ask(name, prompt_of(50), max_tokens=6))
            answers.append(tokens_of(finish(engine)[name]))
    assert answers.count(answers[0]) == 4


def _with_scales(model: Path, **scales: torch.Tensor) -> Path:
    file = model / "model.safetensors"
    weights = load_file(file)
    weights |= {f"model.layers.1.self_attn.{name}": scale for name, scale in scales.items()}
    save_file(weights, file, metadata={"format": "pt"})
    return model


def test_scales_of_the_checkpoint_are_part_of_the_encoding(tmp_path: Path) -> None:
    model = _with_scales(make_tiny_model(tmp_path / "m"), k_scale=torch.tensor([0.0125]), v_scale=torch.tensor(2.0))
    settings = EngineSettings(model=str(model), dtype="float32", kv_dtype="fp8_e4m3", num_blocks=4)
    _, executor = build_executor(settings)
    encodings = {(t.layer, t.part): t.encoding for t in executor.layouts[0].tensors}
    scale = torch.tensor(0.0125).item()
    assert encodings["layers.1.attn", "k"] == f"fp8_e4m3:{scale!r}"
    assert encodings["layers.1.attn", "v"] == "fp8_e4m3:2.0"
    assert encodings["layers.0.attn", "k"] == "fp8_e4m3"


def test_a_scale_that_is_not_positive_is_refused(tmp_path: Path) -> None:
    for i, bad in enumerate((torch.tensor(0.0), torch.tensor(float("nan")), torch.ones(2))):
        model = _with_scales(make_tiny_model(tmp_path / str(i)), k_scale=bad)
        settings = EngineSettings(model=str(model), kv_dtype="fp8_e4m3")
        with pytest.raises(
            UnknownModel, match=r"k_scale' of shape .* is not one positive number.*--kv-dtype fp8_e4m3_token"
        ):
            kv_format(settings, read_config(model), model)


def test_different_formats_are_refused_at_the_handshake(tmp_path: Path) -> None:  # R1 R6
    model = make_tiny_model(tmp_path / "m")
    scaled = _with_scales(make_tiny_model(tmp_path / "scaled"), k_scale=torch.tensor(0.5))

    def facts(directory: Path, kv_dtype: str) -> Facts:
        engine = EngineSettings(model=str(model), dtype="float32", kv_dtype=kv_dtype)
        config = read_config(directory)
        kv = kv_format(engine, config, directory)
        return Facts.from_engine(describe(WorkerSettings(engine=engine), config, model, "float32", kv))

    assert not verdict(facts(model, "auto"), facts(model, "float32")).refused
    for a, b, fact in (
        (facts(model, "auto"), facts(model, "fp8_e4m3"), "kv.dtype"),
        (facts(model, "fp8_e4m3"), facts(model, "fp8_e4m3_token"), "kv.dtype"),
        (facts(model, "fp8_e4m3"), facts(scaled, "fp8_e4m3"), "kv.scales"),
    ):
        assert [row.fact for row in verdict(a, b).blocking()] == [fact]


def test_unknown_formats_are_named() -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype='fp4' is unknown\. Known: auto, float32, bfloat16, fp8_e4m3"):
        EngineSettings(kv_dtype="fp4")
