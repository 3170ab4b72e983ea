"""Train the byte-level models with three MTP modules that kvferry ships, on Python's own standard library.

    python training/byte_mtp.py byte-mtp
    python training/byte_mtp.py byte-mtp-window --window --start byte-mtp --steps 200 --peak 0.006
    python training/byte_mtp.py byte-mtp-hybrid --hybrid --steps 400

No package has a model with several MTP modules, and some faults of speculation under prefill/decode show only with
one. So this script trains one that takes minutes on one core: text that every machine has, one token per byte, four
layers of the Llama kind, and three modules after DeepSeek-V3 (arXiv 2412.19437, section 2.2). Module i at position p
takes RMSNorm(embedding of token p + i + 1) and RMSNorm(output of module i - 1 at p, or of the model itself for i = 0),
projects both together, and runs one layer; the shared head then predicts token p + i + 2.

The same seed on the same machine gives the same bytes: one thread, no dropout, and batches drawn from one generator.
"""

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

NUM_MODULES = 3
VOCAB = 256
EOS = 0
"""The byte NUL, which is in no source file."""


@dataclass(frozen=True)
class Shape:
    """The shape of the model, as config.json will state it."""

    hidden: int = 160
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    inner: int = 448
    positions: int = 2048
    theta: float = 10000.0
    eps: float = 1e-6
    window: int | None = None
    hybrid: bool = False
    """Whether every other layer is a Mamba-2 layer (arXiv 2405.21060), under the names of Granite 4."""
    mamba_heads: int = 8
    mamba_state: int = 16
    mamba_taps: int = 4

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer, without the modules."""
        return ["mamba" if self.hybrid and i % 2 == 0 else "attention" for i in range(self.layers)]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer, then of each module. With a window, every second layer and module has None."""
        count = self.layers + NUM_MODULES
        if self.window is None:
            return (None,) * count
        seen = [self.window if i % 2 == 0 else None for i in range(self.layers)]
        return tuple(seen + [self.window if i % 2 == 0 else None for i in range(NUM_MODULES)])

    def config(self) -> dict[str, object]:
        """Returns the content of config.json: Llama's keys if Llama has them, and DeepSeek's for the modules."""
        made = self._config()
        if self.hybrid:
            made |= {
                "architectures": ["GraniteMoeHybridForCausalLM"],
                "model_type": "granitemoehybrid",
                "layer_types": self.kinds,
                "shared_intermediate_size": self.inner,
                "num_local_experts": 0,
                "position_embedding_type": "rope",
                "attention_multiplier": self.head_dim**-0.5,
                "mamba_n_heads": self.mamba_heads,
                "mamba_expand": 2,
                "mamba_n_groups": 1,
                "mamba_d_state": self.mamba_state,
                "mamba_d_conv": self.mamba_taps,
            }
        return made

    def _config(self) -> dict[str, object]:
        return {
            "architectures": ["KvferryByteMtpForCausalLM"],
            "model_type": "kvferry_byte_mtp",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": VOCAB,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "tie_word_embeddings": True,
            "num_nextn_predict_layers": NUM_MODULES,
            "layer_types": ["full_attention" if w is None else "sliding_attention" for w in self.windows],
            "sliding_window": self.window,
            "eos_token_id": EOS,
            "dtype": "bfloat16",
        }


HYBRID = Shape(hidden=128, heads=4, inner=320, hybrid=True)
"""The shape of `byte-mtp-hybrid`, with 1.4 million parameters."""


class Attention(nn.Module):
    """Grouped-query attention with rotary position embeddings."""

    def __init__(self, shape: Shape, window: int | None) -> None:
        super().__init__()
        self.shape, self.window = shape, window
        kv = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, rotate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        batch, length, _ = x.shape
        dim = self.shape.head_dim
        q = rotate(self.q_proj(x).view(batch, length, -1, dim).transpose(1, 2))
        k = rotate(self.k_proj(x).view(batch, length, -1, dim).transpose(1, 2))
        v = self.v_proj(x).view(batch, length, -1, dim).transpose(1, 2)
        # Written out, because at these lengths it is four times as fast on CPU as the fused kernel, mostly in the
        # backward pass.
        shared = self.shape.heads // self.shape.kv_heads
        q = q.reshape(batch, -1, shared * length, dim)
        scores = (q @ k.transpose(-1, -2)).view(batch, -1, shared, length, length) / math.sqrt(dim)
        at = torch.arange(length)
        seen = at[None, :] <= at[:, None]
        if self.window is not None:
            seen &= at[None, :] > at[:, None] - self.window
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1).to(v.dtype)
        mixed = (weights.view(batch, -1, shared * length, length) @ v).view(batch, -1, length, dim)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    """A SwiGLU feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Mamba(nn.Module):
    """A Mamba-2 mixer with one group. It computes a matrix over all pairs of tokens, which is fast for short texts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.inner, heads = 2 * shape.hidden, shape.mamba_heads
        channels = self.inner + 2 * shape.mamba_state
        self.in_proj = nn.Linear(shape.hidden, self.inner + channels + heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, shape.mamba_taps, groups=channels)
        self.A_log = nn.Parameter(torch.arange(1, heads + 1).float().log())
        self.D = nn.Parameter(torch.ones(heads))
        self.dt_bias = nn.Parameter(torch.linspace(-4.6, -1.0, heads))
        self.norm = nn.RMSNorm(self.inner, eps=shape.eps)
        self.out_proj = nn.Linear(self.inner, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, rotate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        batch, length, _ = x.shape
        heads, state, inner = self.shape.mamba_heads, self.shape.mamba_state, self.inner
        gate, line, dt = self.in_proj(x).split([inner, inner + 2 * state, heads], dim=-1)
        line = functional.silu(self.conv1d(functional.pad(line.transpose(1, 2), (self.shape.mamba_taps - 1, 0))))
        values, b, c = line.transpose(1, 2).float().split([inner, state, state], dim=-1)
        dt = functional.softplus(dt.float() + self.dt_bias).transpose(1, 2)
        faded = (-self.A_log.exp()[:, None] * dt).cumsum(-1)
        left = faded[..., :, None] - faded[..., None, :]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        pairs = (c @ b.transpose(1, 2))[:, None] * left.masked_fill(future, float("-inf")).exp() * dt[:, :, None]
        values = values.view(batch, length, heads, -1).transpose(1, 2)
        mixed = (pairs @ values + self.D[:, None, None] * values).transpose(1, 2).reshape(batch, length, inner)
        return self.out_proj(self.norm(mixed * functional.silu(gate.float())))


class SharedMlp(nn.Module):
    """A SwiGLU feed-forward network under Granite's names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_linear = nn.Linear(shape.hidden, 2 * shape.inner, bias=False)
        self.output_linear = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.input_linear(x).chunk(2, dim=-1)
        return self.output_linear(functional.silu(gate) * up)


class HybridLayer(nn.Module):
    """A layer of Granite's kind."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        mixer = self.mixer_name = "mamba" if kind == "mamba" else "self_attn"
        self.add_module(mixer, Mamba(shape) if kind == "mamba" else Attention(shape, None))
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.shared_mlp = SharedMlp(shape)

    def forward(self, x: torch.Tensor, rotate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = x + self.get_submodule(self.mixer_name)(self.input_layernorm(x), rotate)
        return x + self.shared_mlp(self.post_attention_layernorm(x))


class Layer(nn.Module):
    """A layer of the Llama kind."""

    def __init__(self, shape: Shape, window: int | None) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.self_attn = Attention(shape, window)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.mlp = Mlp(shape)

    def forward(self, x: torch.Tensor, rotate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotate)
        return x + self.mlp(self.post_attention_layernorm(x))


class Module(Layer):
    """An MTP module: two inputs, a projection, a layer, and the norm before the shared head."""

    def __init__(self, shape: Shape, window: int | None) -> None:
        super().__init__(shape, window)
        self.enorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.hnorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.eh_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(shape.hidden, eps=shape.eps)})

    def join(self, embedded: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Returns the input of the module's layer."""
        joined: torch.Tensor = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(before)], dim=-1))
        return joined


class ByteMtp(nn.Module):
    """The model and its modules, under the names of the checkpoint without the prefix `model.`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(VOCAB, shape.hidden)
        main: list[nn.Module] = [Layer(shape, window) for window in shape.windows[: shape.layers]]
        if shape.hybrid:
            main = [HybridLayer(shape, kind) for kind in shape.kinds]
        self.layers = nn.ModuleList(main + [Module(shape, window) for window in shape.windows[shape.layers :]])
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = ("o_proj.weight", "down_proj.weight", "out_proj.weight", "output_linear.weight")
                scale = 0.02 / math.sqrt(2 * shape.layers) if name.endswith(last) else 0.02
                nn.init.normal_(weight, std=scale if "embed" in name else scale * math.sqrt(512 / shape.hidden))

    def forward(self, tokens: torch.Tensor, length: int) -> list[torch.Tensor]:
        """Returns the logits of the model and of each module, [batch, length, VOCAB] each.

        `tokens` is [batch, length + NUM_MODULES].
        """
        rotate = self._rotary(length)
        x = self.embed_tokens(tokens[:, :length])
        for layer in self.layers[: self.shape.layers]:
            x = layer(x, rotate)
        logits = [self._head(self.norm(x))]
        for i, module in enumerate(self.layers[self.shape.layers :]):
            x = module(module.join(self.embed_tokens(tokens[:, i + 1 : i + 1 + length]), x), rotate)
            logits.append(self._head(module.shared_head["norm"](x)))
        return logits

    def _head(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.embed_tokens.weight)

    def _rotary(self, length: int) -> Callable[[torch.Tensor], torch.Tensor]:
        dim = self.shape.head_dim
        frequency = 1.0 / self.shape.theta ** (torch.arange(0, dim, 2).float() / dim)
        angle = torch.outer(torch.arange(length).float(), frequency)
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)

        def rotate(x: torch.Tensor) -> torch.Tensor:
            return x * cos.to(x.dtype) + x.roll(dim // 2, -1) * sin.to(x.dtype)

        return rotate


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates (Jordan et al. 2024, "Muon"). Matrices need half the steps of Adam."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter once."""
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                average.lerp_(param.grad, 1 - group["momentum"])
                update = orthogonal(param.grad.lerp(average, group["momentum"]))
                param.mul_(1 - 0.1 * group["lr"])
                param.add_(update, alpha=-group["lr"] * max(1.0, param.size(0) / param.size(1)) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Returns roughly the nearest orthogonal matrix, by five quintic Newton-Schulz iterations in bfloat16."""
    x = matrix.bfloat16()
    x = x.T if matrix.size(0) > matrix.size(1) else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return (x.T if matrix.size(0) > matrix.size(1) else x).to(matrix.dtype)


def text(limit_bytes: int | None = None) -> torch.Tensor:
    """Returns the bytes of the standard library's top-level modules, sorted by name, each with a NUL at its end."""
    parts = [path.read_bytes() + b"\0" for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    return torch.frombuffer(bytearray(b"".join(parts)[:limit_bytes]), dtype=torch.uint8).long()


def train(
    shape: Shape,
    data: torch.Tensor,
    *,
    steps: int,
    batch: int,
    length: int,
    seed: int,
    peak: float = 0.02,
    start: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> ByteMtp:
    """Trains a model; the same arguments give the same weights. `start`: the directory of a model to continue from."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    model = ByteMtp(shape)
    if start is not None:
        weights = load_file(start / "model.safetensors")
        model.load_state_dict({name.removeprefix("model."): value.float() for name, value in weights.items()})
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    optimisers = [Muon(matrices, peak), torch.optim.AdamW(others, lr=peak / 4, betas=(0.9, 0.98), weight_decay=0.0)]
    span = length + NUM_MODULES + 1
    draws = torch.Generator().manual_seed(seed)
    started = time.perf_counter()
    for step in range(steps):
        share = min((step + 1) / max(1, steps // 20), 1.0)
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        for optimiser, most in zip(optimisers, (peak, peak / 4), strict=True):
            optimiser.param_groups[0]["lr"] = most * share * max(decay, 0.02)
        starts = torch.randint(0, len(data) - span, (batch,), generator=draws)
        rows = torch.stack([data[at : at + span] for at in starts.tolist()])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(rows[:, :-1], length)
        losses = [
            functional.cross_entropy(each.float().flatten(0, 1), rows[:, i + 1 : i + 1 + length].flatten())
            for i, each in enumerate(logits)
        ]
        loss = losses[0] + 0.4 * sum(losses[1:], torch.zeros(()))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            nats = " ".join(f"{each.item():.3f}" for each in losses)
            report(f"step {step}/{steps} nats per byte {nats} {time.perf_counter() - started:.0f} s")
    return model


def tokenizer() -> dict[str, object]:
    """Returns the content of tokenizer.json: one token per byte, in the byte-level alphabet of GPT-2."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []}
    end = {"id": EOS, "content": letters[EOS], "special": True}
    end |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }


def save(model: ByteMtp, directory: Path) -> None:
    """Writes a Hugging Face directory."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": value.detach().bfloat16().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    letters = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "Ā",
        "model_max_length": model.shape.positions,
    }
    for name, value in (
        ("config.json", model.shape.config()),
        ("tokenizer.json", tokenizer()),
        ("tokenizer_config.json", letters),
    ):
        (directory / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--window", action="store_true", help="give every other layer and module a window of 48 tokens")
    parser.add_argument(
        "--hybrid", action="store_true", help="make every other layer a Mamba-2 layer, in a smaller model"
    )
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=5)
    parser.add_argument("--length", type=int, default=224)
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--peak", type=float, default=0.02, help="the highest learning rate")
    parser.add_argument("--start", type=Path, help="continue from the weights in this directory")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    shape = HYBRID if args.hybrid else Shape(window=48 if args.window else None)
    model = train(
        shape,
        text(),
        steps=args.steps,
        batch=args.batch,
        length=args.length,
        seed=args.seed,
        peak=args.peak,
        start=args.start,
        report=print,
    )
    save(model, args.out)


if __name__ == "__main__":
    main()
