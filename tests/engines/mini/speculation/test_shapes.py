"""Speculation with a recurrent state, with stages and ranks, with a draft model, with a drafter on decode alone."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvferry.engines.mini.models.catalog import model_directory, read_config
from kvferry.engines.mini.speculation import eagle3, mtp
from kvferry.engines.mini.speculation.drafter_info import open_drafter
from kvferry.engines.mini.speculation_settings import SpeculationSettings
from kvferry.errors import ConfigError, UnknownModel
from kvferry.modelfiles import read_json
from kvferry.settings import LeaseSettings, TransferMode
from tests.engines.mini.speculation.conftest import MakeServing, accepted, ask, engine, text, texts, tokens
from tests.harness.serving import Alone, Pair
from tests.harness.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine
Plain = Callable[..., list[list[int]]]

PROMPTS = texts((1, 2, 3, 4, 5, 8, 9, 16, 17, 33), stride=900)
HYBRID: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 160,
    "num_local_experts": 0,
    "mamba_n_heads": 6,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "tie_word_embeddings": True,
    "num_nextn_predict_layers": 3,
}


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Writes a hybrid of Mamba-2 and attention with random weights, and modules that mostly repeat the last token."""
    directory = make_tiny_model(tmp_path_factory.mktemp("hybrid"), "llama", seed=11, **HYBRID)
    config = mtp.read_modules({**HYBRID, **_raw(directory)})
    assert config is not None
    random = torch.Generator().manual_seed(1)
    weights = {}
    for name, shape in mtp.expected_tensors(config, 3):
        weights[name] = torch.randn(shape, generator=random) * 0.05 + (1 if "norm" in name else 0)
        if "eh_proj" in name:
            weights[name][:, : shape[0]] += torch.eye(shape[0])
    save_file(weights, directory / "mtp.safetensors", metadata={"format": "pt"})
    return str(directory)


def _raw(directory: Path) -> dict[str, Any]:
    return read_json(directory / "config.json")


@pytest.mark.parametrize("count", [1, 3])
def test_a_state_returns_to_before_a_rejected_draft(
    serving: MakeServing, plain: Plain, hybrid: str, count: int
) -> None:
    one = serving(Alone, engine(hybrid, "mtp", count, max_batch_tokens=24))
    assert tokens(one.serve(ask(PROMPTS, 30))) == plain(hybrid, PROMPTS, 30)
    assert accepted(one).drafted[0] > 100
    one.engine.check()
    assert one.engine.stats().free_blocks == one.engine.stats().blocks


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_text_drafters_with_a_state(serving: MakeServing, plain: Plain, hybrid: str, method: str) -> None:
    one = serving(Alone, engine(hybrid, method, 3, max_batch_tokens=24))
    assert tokens(one.serve(ask(PROMPTS, 30))) == plain(hybrid, PROMPTS, 30)


@pytest.mark.parametrize(("k_p", "k_d"), [(3, 3), (1, 1), (3, 2)])
def test_modules_of_a_hybrid_across_the_hand_off(
    serving: MakeServing, plain: Plain, hybrid: str, k_p: int, k_d: int
) -> None:  # R32
    pair = serving(Pair, engine(hybrid, "mtp", k_p), engine(hybrid, "mtp", k_d))
    alone = serving(Alone, engine(hybrid, "mtp", k_d))
    assert tokens(pair.serve(ask(PROMPTS, 16))) == tokens(alone.serve(ask(PROMPTS, 16))) == plain(hybrid, PROMPTS, 16)
    if k_d > 1:
        assert accepted(pair) == accepted(alone)


HYBRID_PAIRS = [(3, 3, "pull"), (0, 3, "push"), (1, 3, "push"), (5, 2, "pull"), (2, 5, "pull"), (3, 1, "pull")]


@pytest.mark.parametrize(("k_p", "k_d", "mode"), HYBRID_PAIRS)
def test_trained_modules_of_a_hybrid_across_the_hand_off(
    serving: MakeServing, plain: Plain, k_p: int, k_d: int, mode: str
) -> None:
    """R5, R32, R35: many drafts are accepted, the same ones as in a single engine, in unequal blocks. A state cannot be
    clamped to fewer tokens: both sides stop where the number of modules says, whatever their depths."""
    model, prompts = "byte-mtp-hybrid", [*PROMPTS, text(70, 2500)]
    settings = [engine(model, "mtp", count, block_tokens=size) for count, size in ((k_p, 8), (k_d, 4))]
    pair, alone = serving(Pair, *settings, mode=TransferMode(mode)), serving(Alone, settings[1])
    served = pair.serve(ask(prompts, 24))
    assert tokens(served) == tokens(alone.serve(ask(prompts, 24))) == plain(model, prompts, 24)
    assert accepted(pair) == accepted(alone)
    assert accepted(pair).by_position[0] > 0.5
    for prompt, one in zip(prompts, served, strict=True):
        assert one.last is not None
        assert one.last.account is not None
        assert one.last.account.handed_over + one.last.account.cached == max(0, len(prompt) - 3)
        assert one.last.account.reason.startswith("the model keeps a recurrent state")


@pytest.mark.parametrize("draft", ["byte-mtp", "windowed"])
def test_draft_model(serving: MakeServing, plain: Plain, byte_mtp: str, windowed: str, draft: str) -> None:  # R7
    """The target itself as draft model: all drafts are accepted; with other layers, not all. Its KV is handed over."""
    model = windowed if draft == "windowed" else byte_mtp
    settings = engine(byte_mtp, "draft_model", 3, spec_model=model)
    pair, alone = serving(Pair, settings, settings), serving(Alone, settings)
    expected = plain(byte_mtp, PROMPTS, 16)
    assert tokens(pair.serve(ask(PROMPTS, 16))) == tokens(alone.serve(ask(PROMPTS, 16))) == expected
    assert (accepted(pair).rate == 1.0) == (accepted(alone).rate == 1.0) == (draft == "byte-mtp")
    assert accepted(pair).rate > 0.2


def eagle3_head(directory: Path, step: int = 2) -> str:
    """Writes a head in the format of the speculators package for byte-mtp: every `step`th token, random weights."""
    layer = {name: _raw(model_directory("byte-mtp"))[name] for name in (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "max_position_embeddings", "rms_norm_eps", "rope_theta",
    )}  # fmt: skip
    raw = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**layer, "num_hidden_layers": 1},
        "draft_vocab_size": 128,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    }
    (directory / "config.json").write_text(json.dumps(raw))
    config = eagle3.read_eagle3(raw, read_config(model_directory("byte-mtp")))
    random = torch.Generator().manual_seed(2)
    weights = {
        name: torch.randn(shape, generator=random) * 0.05 + (1 if "norm" in name else 0)
        for name, shape in eagle3.expected_tensors(config)
    }
    weights["d2t"] = torch.arange(128) * (step - 1)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def test_eagle3(serving: MakeServing, plain: Plain, byte_mtp: str, tmp_path: Path) -> None:
    """A random head: the text is right, the whole prompt is handed over with the head's KV, and the lookahead is 1."""
    settings = engine(byte_mtp, "eagle3", 3, spec_model=eagle3_head(tmp_path))
    pair, alone = serving(Pair, settings, settings), serving(Alone, settings)
    served = pair.serve(ask(PROMPTS, 16))
    assert tokens(served) == tokens(alone.serve(ask(PROMPTS, 16))) == plain(byte_mtp, PROMPTS, 16)
    assert accepted(alone).drafted[2] > 50
    assert all(one.last and one.last.account and one.last.account.recomputed == 0 for one in served)
    assert any(tensor.layer == "eagle.layers.0.attn" for tensor in pair.engine.executor.layouts[0].tensors)


@pytest.mark.process
def test_stages_on_prefill(serving: MakeServing, plain: Plain, byte_mtp: str) -> None:  # R23
    """The modules are on the last stage, and decode finds them by name."""
    prefill, decode = engine(byte_mtp, "mtp", 3, pp=2), engine(byte_mtp, "mtp", 3)
    pair, alone = serving(Pair, prefill, decode, transport="nixl"), serving(Alone, decode)
    served = pair.serve(ask(PROMPTS))
    assert tokens(served) == tokens(alone.serve(ask(PROMPTS))) == plain(byte_mtp, PROMPTS)
    assert accepted(pair) == accepted(alone)
    handed = [one.last.account.handed_over for one in served if one.last and one.last.account]
    assert handed == [max(0, len(prompt) - 3) for prompt in PROMPTS]


@pytest.mark.process
@pytest.mark.parametrize("shape", [{"pp": 2}, {"tp": 2}], ids=str)
def test_sampled_drafts_of_rank_processes(serving: MakeServing, byte_mtp: str, shape: dict[str, Any]) -> None:
    """Draft probabilities come from the rank that sampled the drafts: the tokens are those of one rank."""
    settings = engine(byte_mtp, "mtp", 3, spec_draft_sample_method="probabilistic")
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 6}
    one, many = serving(Alone, settings), serving(Alone, replace(settings, **shape))
    assert tokens(many.serve(ask(PROMPTS, 12, **sampling))) == tokens(one.serve(ask(PROMPTS, 12, **sampling)))
    assert accepted(many) == accepted(one)
    assert 0.3 < accepted(one).rate < 1


@pytest.mark.parametrize(("method", "draft"), [("mtp", None), ("draft_model", "byte-mtp")])
def test_a_drafter_on_decode_alone_starts_cold_if_configured(
    serving: MakeServing, plain: Plain, byte_mtp: str, method: str, draft: str | None
) -> None:
    """R3: refused and recomputed; or, with cold_start, handed over whole, with drafts that begin after the prompt."""
    changes = {"spec_model": draft} if draft else {}
    expected = plain(byte_mtp, PROMPTS, 24)
    pair = serving(Pair, engine(byte_mtp), engine(byte_mtp, method, 3, spec_cold_start=True, **changes))
    served = pair.serve(ask(PROMPTS, 24))
    assert tokens(served) == expected
    assert all(one.last and one.last.account and one.last.account.recomputed == 0 for one in served)
    assert accepted(pair).rate > 0.3
    lease = LeaseSettings(ttl_s=3.0, renew_every_s=1.0)
    other = serving(Pair, engine(byte_mtp), engine(byte_mtp, method, 3, **changes), lease=lease)
    refused = other.serve(ask(PROMPTS[-1:], 24))
    assert tokens(refused) == expected[-1:]
    assert refused[0].last is not None
    assert refused[0].last.account is not None
    assert refused[0].last.account.handed_over == 0
    assert "speculation.method" in refused[0].last.account.reason


@pytest.mark.parametrize(
    ("model", "method", "mode", "left"),
    [
        ("byte_mtp", "mtp", TransferMode.PULL, 3),
        ("byte_mtp", "mtp", TransferMode.PUSH, 3),
        ("windowed", "mtp", TransferMode.PULL, 3),
        ("hybrid", "mtp", TransferMode.PULL, 3),
        ("byte_mtp", "draft_model", TransferMode.PULL, 0),
        ("byte_mtp", "eagle3", TransferMode.PUSH, 0),
    ],
)
def test_a_drafter_on_prefill_alone_is_a_note_and_costs_only_time(
    serving: MakeServing,
    plain: Plain,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    model: str,
    method: str,
    mode: TransferMode,
    left: int,
) -> None:
    """R3, R19, R36: decode ignores the drafter's layers, and computes only what prefill leaves to it."""
    caplog.set_level(logging.INFO, "kvferry.handshake")
    target = request.getfixturevalue(model)
    draft = {"draft_model": target, "eagle3": eagle3_head(tmp_path) if method == "eagle3" else None}.get(method)
    changes = {"spec_model": draft} if draft else {}
    pair = serving(Pair, engine(target, method, 3, **changes), engine(target), mode=mode)
    assert isinstance(pair, Pair)
    served = pair.serve(ask(PROMPTS, 16))
    assert tokens(served) == plain(target, PROMPTS, 16)
    for prompt, one in zip(PROMPTS, served, strict=True):
        assert one.last is not None
        assert one.last.account is not None
        handed = max(0, len(prompt) - left)
        assert (one.last.account.handed_over, one.last.account.recomputed) == (handed, len(prompt) - handed)
        assert bool(one.last.account.reason) == (handed < len(prompt))
    note = "speculation.method: decode drafts nothing"
    assert any("verdict=notes" in line and note in line for line in caplog.messages)
    for worker in (pair.prefill, pair.decode):
        peers = worker.describe()["peers"]
        assert isinstance(peers, list)
        assert peers[0]["notes"][0].startswith(note)


def test_wrong_settings_are_reported_before_anything_is_loaded(tmp_path: Path) -> None:
    directory = model_directory("byte-mtp")
    config = engine("byte-mtp")
    assert config.speculation is None
    target = read_config(directory)
    tiny = make_tiny_model(tmp_path / "tiny")
    other = SpeculationSettings(method="draft_model", num_speculative_tokens=1, model=str(tiny))
    with pytest.raises(ConfigError, match="no MTP modules"):
        open_drafter(SpeculationSettings(method="mtp", num_speculative_tokens=1), tiny, target)
    with pytest.raises(ConfigError, match=r"vocabulary of 320 and the target one of 256"):
        open_drafter(other, directory, target)
    with pytest.raises(UnknownModel, match="speculators_model_type"):
        open_drafter(SpeculationSettings(method="eagle3", num_speculative_tokens=1, model=str(tiny)), directory, target)
    head = SpeculationSettings(method="eagle3", num_speculative_tokens=1, model="eagle3-smollm2")
    with pytest.raises(ConfigError, match=r"hidden_size is 576, the target's 160\. Use a head"):
        open_drafter(head, directory, target)
    with pytest.raises(ConfigError, match="is not a JSON object"):
        SpeculationSettings.from_json("mtp")
    with pytest.raises(ConfigError, match="has no key 'depth'"):
        SpeculationSettings.from_json('{"method": "mtp", "num_speculative_tokens": 3, "depth": 1}')
    with pytest.raises(ConfigError, match="takes no model"):
        SpeculationSettings(method="mtp", num_speculative_tokens=1, model="x")
    with pytest.raises(ConfigError, match="and that at most 64"):
        SpeculationSettings(method="ngram", num_speculative_tokens=1, prompt_lookup_max=65)
    with pytest.raises(ConfigError, match="from 0 to 32"):
        SpeculationSettings.from_json('{"method": "ngram", "num_speculative_tokens": 99}')


def test_a_head_that_names_tokens_of_no_target_is_refused_at_the_start(
    serving: MakeServing, byte_mtp: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"42 draft ids .* \(d2t: 258\) that the target, with 256, does not have"):
        serving(Alone, engine(byte_mtp, "eagle3", 3, spec_model=eagle3_head(tmp_path, step=3)))


def test_a_state_keeps_accepted_drafts(serving: MakeServing, plain: Plain, hybrid: str) -> None:
    """The answer itself as prompt: what follows it once follows it again, so drafts from the text are accepted, and
    rejected."""
    first = plain(hybrid, [text(40, 100)], 40)[0]
    prompt = [*text(40, 100), *first, *text(40, 100)]
    one = serving(Alone, engine(hybrid, "ngram", 3))
    assert tokens(one.serve(ask([prompt], 60))) == plain(hybrid, [prompt], 60)
    one.engine.check()
