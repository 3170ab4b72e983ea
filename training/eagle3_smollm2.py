"""Train the EAGLE-3 head for SmolLM2-135M that kvferry ships, on SmolLM2's own output.

    python training/eagle3_smollm2.py generate WORK         # about 10 minutes of one core with bfloat16 units
    python training/eagle3_smollm2.py train WORK OUT        # about 8 minutes

Prompts are text that every machine has: Python's standard library (docstrings, the topics of pydoc, its licence, source
files), as it is and as questions in the model's chat template. Half of the answers are greedy, and half are sampled at
a temperature. `generate` stores the hidden states of three layers, which the head will read (EAGLE-3, arXiv
2503.01840), and the model's last hidden state, from which `train` computes the target's distribution again.

The head learns that distribution, not the tokens: the loss is the cross entropy over its own, smaller vocabulary, which
has the most frequent tokens of the answers. Training-time test: from each slot the head continues from its own output
for STEPS tokens, as it will when it drafts. Keys and values of earlier slots come from the target's hidden states, and
those of its own steps from its own outputs. The result is a directory of the `speculators` package; it has no
embedding, because the head uses the target's.

The same seed on the same machine and Python gives the same bytes: one thread, and batches drawn from one generator.
Both commands may be stopped at any time, and continue where they were.
"""

import argparse
import ast
import json
import math
import os
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from byte_mtp import Muon
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

STEPS = 3
"""How many tokens the head drafts in a row during training."""
FADE = 0.8
"""The weight of a step, relative to the previous one: a draft counts only if those before it were accepted."""
HELD_OUT = "argparse.py"
"""The file that is not trained on: `python -m benchmarks.spec` takes its prompts from it."""
QUESTIONS = (
    "What is {} in Python?",
    "Explain {} in a few sentences.",
    "Write a short example that uses {}.",
    "When would I use {}, and when not?",
    "Summarise this: {}",
)


@dataclass(frozen=True)
class Shape:
    """The shape of the head, under the names of a Llama config. Everything else is as in the target."""

    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 512
    draft_vocab_size: int = 2560
    aux: tuple[int, ...] = (2, 15, 27)
    """The layers of the target whose inputs the head reads."""


@dataclass(frozen=True)
class Target:
    """The entries of the target's config.json that the head needs."""

    hidden: int
    vocab: int
    positions: int
    eps: float
    theta: float

    @classmethod
    def read(cls, directory: Path) -> "Target":
        """Reads config.json in a Hugging Face directory."""
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        rope = raw.get("rope_parameters") or raw
        return cls(
            hidden=raw["hidden_size"],
            vocab=raw["vocab_size"],
            positions=raw["max_position_embeddings"],
            eps=raw["rms_norm_eps"],
            theta=rope["rope_theta"],
        )


# ---- the target's answers


def sources() -> dict[str, list[str]]:
    """Returns texts by kind, in an order that depends on the Python version alone. Nothing is imported or run."""
    library = Path(sysconfig.get_path("stdlib"))
    codes, notes, names = [], [], []
    for path in sorted(library.glob("*.py")):
        if path.name == HELD_OUT:
            continue
        code = path.read_text(encoding="utf-8", errors="replace")
        codes.append(code)
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (doc := ast.get_docstring(node)):
                if len(doc) > 200:
                    notes.append(doc)
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                    names.append(f"{path.stem}.{node.name}")
    topics = ast.parse((library / "pydoc_data" / "topics.py").read_text(encoding="utf-8"))
    tables = [node for node in ast.walk(topics) if isinstance(node, ast.Dict)]
    notes += [value.value for table in tables for value in table.values if isinstance(value, ast.Constant)]
    licence = library / "LICENSE.txt"
    notes += [licence.read_text(encoding="utf-8")] if licence.is_file() else []
    first_lines = [note.split("\n\n")[0].replace("\n", " ") for note in notes]
    return {"code": codes, "notes": notes, "names": names, "lines": [line for line in first_lines if len(line) < 200]}


def prompts(encode: Callable[[str], list[int]], *, rows: int, length: int, seed: int) -> Iterator[list[list[int]]]:
    """Yields batches without end. Their kinds alternate: source code, prose, and questions in the chat template.

    A batch has `rows` prompts of equal length, so that none needs padding.
    """
    draws = torch.Generator().manual_seed(seed)
    texts = sources()
    pieces = {kind: [encode(text) for text in texts[kind]] for kind in ("code", "notes")}
    long_enough = {kind: [ids for ids in each if len(ids) >= length] for kind, each in pieces.items()}
    asked: dict[int, list[list[int]]] = {}
    for number, what in enumerate(texts["names"] + texts["lines"]):
        question = QUESTIONS[number % len(QUESTIONS)].format(what)
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        chat = (
            f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        ids = encode(chat)
        asked.setdefault(len(ids), []).append(ids)
    full = sorted(size for size, each in asked.items() if len(each) >= rows)

    def draw(count: int) -> int:
        return int(torch.randint(0, count, (1,), generator=draws))

    while True:
        for kind in ("code", "notes"):
            batch = []
            for _ in range(rows):
                ids = long_enough[kind][draw(len(long_enough[kind]))]
                at = draw(len(ids) - length + 1)
                batch.append(ids[at : at + length])
            yield batch
        chats = asked[full[draw(len(full))]]
        order = torch.randperm(len(chats), generator=draws)[:rows]
        yield [chats[i] for i in order.tolist()]


class Teacher:
    """The target, run by `transformers` in bfloat16."""

    def __init__(self, directory: Path, aux: Sequence[int]) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        self._aux = aux

    @torch.inference_mode()
    def answer(
        self, batch: Sequence[Sequence[int]], *, stop: int, temperature: float, seed: int
    ) -> dict[str, torch.Tensor]:
        """Answers prompts of equal length, up to `stop` tokens with the prompt.

        Returns, for every token but the last: `ids`, `aux` (the hidden states of three layers, concatenated), `last`
        (the hidden state that the target's head reads), `scale` (the logarithm of the sum of the exponentials of its
        logits) and `best` (its most likely token).
        """
        draws = torch.Generator().manual_seed(seed)
        ids = torch.tensor(batch)
        kept: dict[str, list[torch.Tensor]] = {name: [] for name in ("aux", "last", "scale", "best")}
        cache, new = None, ids
        while True:
            out = self._model.model(new, cache=cache, use_cache=True, output_hidden_states=True)
            cache, last = out.past_key_values, out.last_hidden_state
            kept["aux"].append(torch.cat([out.hidden_states[i] for i in self._aux], dim=-1))
            kept["last"].append(last)
            for row in last.split(1, dim=1):
                logits = self._model.lm_head(row).float()
                kept["scale"].append(logits.logsumexp(-1))
                kept["best"].append(logits.argmax(-1))
            new = kept["best"][-1]
            if temperature:
                new = torch.multinomial(torch.softmax(logits[:, 0] / temperature, -1), 1, generator=draws)
            if ids.size(1) + 1 > stop:
                return {"ids": ids, **{name: torch.cat(parts, 1) for name, parts in kept.items()}}
            ids = torch.cat([ids, new], 1)


def generate(
    directory: Path,
    work: Path,
    *,
    batches: int,
    rows: int,
    prompt: int,
    stop: int,
    seed: int,
    aux: Sequence[int],
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Writes those files `work`/part-<n>.safetensors that are missing."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    work.mkdir(parents=True, exist_ok=True)
    teacher = Teacher(directory, aux)
    for number, batch in enumerate(prompts(encode, rows=rows, length=prompt, seed=seed)):
        if number == batches:
            return
        path = work / f"part-{number:03}.safetensors"
        if path.exists():
            continue
        began = time.perf_counter()
        temperature = 0.0 if number // 3 % 2 == 0 else 0.8
        part = teacher.answer(batch, stop=stop, temperature=temperature, seed=seed + number)
        save_file({name: value.contiguous() for name, value in part.items()}, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)
        report(f"part {number}/{batches} {part['ids'].numel()} tokens {time.perf_counter() - began:.0f} s")


# ---- the head


class Head(nn.Module):
    """The head, under the names of its checkpoint, which kvferry.engines.mini.speculation.eagle3 explains."""

    def __init__(self, shape: Shape, target: Target) -> None:
        super().__init__()
        self.shape, self.target = shape, target
        hidden, dim = target.hidden, shape.head_dim
        query, key = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
        inner = shape.intermediate_size
        self.fc = nn.Linear(len(shape.aux) * hidden, hidden, bias=False)
        layer = nn.Module()
        layer.hidden_norm = nn.RMSNorm(hidden, eps=target.eps)
        layer.input_layernorm = nn.RMSNorm(hidden, eps=target.eps)
        layer.post_attention_layernorm = nn.RMSNorm(hidden, eps=target.eps)
        layer.self_attn = nn.Module()
        layer.self_attn.q_proj = nn.Linear(2 * hidden, query, bias=False)
        layer.self_attn.k_proj = nn.Linear(2 * hidden, key, bias=False)
        layer.self_attn.v_proj = nn.Linear(2 * hidden, key, bias=False)
        layer.self_attn.o_proj = nn.Linear(query, hidden, bias=False)
        layer.mlp = nn.Module()
        layer.mlp.gate_proj = nn.Linear(hidden, inner, bias=False)
        layer.mlp.up_proj = nn.Linear(hidden, inner, bias=False)
        layer.mlp.down_proj = nn.Linear(inner, hidden, bias=False)
        self.layers = nn.ModuleList([layer])
        self.norm = nn.RMSNorm(hidden, eps=target.eps)
        self.lm_head = nn.Linear(hidden, shape.draft_vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.005 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.03)

    def forward(self, aux: torch.Tensor, embedded: torch.Tensor) -> list[torch.Tensor]:
        """Returns the logits of STEPS drafts from each of `count` slots: [batch, count, draft vocabulary] each.

        `aux` is [batch, count, layers * hidden]. `embedded` [batch, count + STEPS - 1, hidden] is the token after each
        slot, and after each draft as if all drafts were accepted. Step j of slot a is at position a + j. It attends to
        the slots up to a, computed from the target's hidden states, and to its own earlier steps.
        """
        batch, count, _ = aux.shape
        layer, shape = self.layers[0], self.shape
        heads, groups = shape.num_attention_heads, shape.num_key_value_heads
        before = self.fc(aux)
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        keys, values, logits = [], [], []
        for j in range(STEPS):
            normed = layer.hidden_norm(before)
            x = torch.cat([layer.input_layernorm(embedded[:, j : j + count]), normed], dim=-1)
            rotate = self._rotary(j, count)

            def split(y: torch.Tensor) -> torch.Tensor:
                return y.view(batch, count, -1, shape.head_dim).transpose(1, 2)

            query = rotate(split(layer.self_attn.q_proj(x))).view(batch, groups, heads // groups, count, shape.head_dim)
            keys.append(rotate(split(layer.self_attn.k_proj(x))).unsqueeze(2))
            values.append(split(layer.self_attn.v_proj(x)).unsqueeze(2))
            scores = (query @ keys[0].transpose(-1, -2)).masked_fill(~seen, float("-inf"))
            own = [(query * key).sum(-1, keepdim=True) for key in keys[1:]]
            scale = 1 / math.sqrt(shape.head_dim)
            weights = torch.softmax(torch.cat([scores, *own], dim=-1).float() * scale, dim=-1).to(x.dtype)
            mixed = weights[..., :count].to(values[0].dtype) @ values[0]
            for i, value in enumerate(values[1:]):
                mixed = mixed + weights[..., count + i : count + i + 1] * value
            mixed = mixed.reshape(batch, heads, count, shape.head_dim).transpose(1, 2).reshape(batch, count, -1)
            x = normed + layer.self_attn.o_proj(mixed)
            y = layer.post_attention_layernorm(x)
            before = x + layer.mlp.down_proj(functional.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
            logits.append(self.lm_head(self.norm(before)))
        return logits

    def _rotary(self, first: int, count: int) -> Callable[[torch.Tensor], torch.Tensor]:
        dim = self.shape.head_dim
        frequency = 1.0 / self.target.theta ** (torch.arange(0, dim, 2).float() / dim)
        angle = torch.outer(torch.arange(first, first + count).float(), frequency)
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)

        def rotate(x: torch.Tensor) -> torch.Tensor:
            return x * cos.to(x.dtype) + x.roll(dim // 2, -1) * sin.to(x.dtype)

        return rotate


class Data:
    """All parts, in memory. The last answers of each are held out for measuring."""

    def __init__(self, work: Path, directory: Path, shape: Shape, *, held_out: int = 8) -> None:
        parts = [load_file(path) for path in sorted(work.glob("part-*.safetensors"))]
        self.shape, self._parts = shape, parts
        sizes = [len(part["ids"]) for part in parts]
        self.train = [(p, r) for p, size in enumerate(sizes) for r in range(size - held_out)]
        self.held = [(p, r) for p, size in enumerate(sizes) for r in range(size - held_out, size)]
        weights = load_file(directory / "model.safetensors")
        self._embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"].float()
        counts = torch.zeros(len(self._embedding), dtype=torch.int64)
        for part in parts:
            counts += torch.bincount(part["best"][:-held_out].flatten(), minlength=len(counts))
        order = torch.sort(counts, descending=True, stable=True).indices[: shape.draft_vocab_size]
        self.ids = order.sort().values
        self.covered = float(counts[self.ids].sum() / counts.sum())
        self.rows_of_vocab = self._embedding[self.ids]

    def batch(self, rows: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        """Returns (aux, embedded, target_probs, best).

        Head.forward reads the first two. The others are, for each token but the first, the target's probabilities of
        the draft vocabulary (which sum to less than 1) and its most likely token.
        """
        names = ("ids", "aux", "last", "scale", "best")
        length = min(self._parts[p]["ids"].size(1) for p, _ in rows)
        many = {name: torch.stack([self._parts[p][name][r][:length] for p, r in rows]) for name in names}
        count = many["aux"].size(1) - STEPS
        embedded = functional.embedding(many["ids"][:, 1 : count + STEPS], self._embedding)
        logits = (many["last"][:, 1:] @ self.rows_of_vocab.T).float()
        target_probs = (logits - many["scale"][:, 1:, None]).exp()
        return many["aux"][:, :count], embedded, target_probs, many["best"][:, 1:]


def losses(head: Head, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Returns the cross entropy of each step."""
    aux, embedded, target_probs, _ = batch
    count = aux.size(1)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(aux, embedded)
    logs = (torch.log_softmax(each.float(), -1) for each in logits)
    return [-(target_probs[:, j : j + count] * log).sum(-1).mean() for j, log in enumerate(logs)]


@torch.no_grad()
def acceptance(head: Head, data: Data, rows: int) -> list[float]:
    """Returns, for each step, how often held-out drafts would be accepted if all earlier ones were.

    A draft is accepted if it is the target's most likely token.
    """
    hits = torch.zeros(STEPS)
    total = 0
    for at in range(0, rows, 8):
        aux, embedded, _, best = data.batch(data.held[at * len(data.held) // rows :][:8])
        with torch.autocast("cpu", torch.bfloat16):
            logits = head(aux, embedded)
        accepted = torch.ones(aux.shape[:2], dtype=torch.bool)
        for j, each in enumerate(logits):
            accepted &= data.ids[each.argmax(-1)] == best[:, j : j + aux.size(1)]
            hits[j] += accepted.sum()
        total += accepted.numel()
    reached = torch.cat([torch.tensor([float(total)]), hits[:-1]])
    return [float(x) for x in hits / reached.clamp(min=1)]


def train(
    data: Data,
    target: Target,
    *,
    steps: int,
    rows: int,
    seed: int,
    peak: float,
    stop: int | None = None,
    state: Path | None = None,
    every: int = 60,
    report: Callable[[str], None] = lambda line: None,
    keep: Callable[[Head], None] = lambda head: None,
) -> Head:
    """Trains a head.

    `state` is the file from which training continues, and to which it is saved every `every` steps; `keep` is called
    then, too. `stop` ends training before `steps`, on which the learning rate depends.
    """
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads memory that was not written
    head = Head(data.shape, target)
    with torch.no_grad():
        head.lm_head.weight.copy_(data.rows_of_vocab)
        head.norm.weight.copy_(data.norm)
        head.fc.weight[:, -target.hidden :] += torch.eye(target.hidden)
    matrices = [p for name, p in head.named_parameters() if p.dim() > 1 and "lm_head" not in name]
    others = [p for name, p in head.named_parameters() if p.dim() <= 1 or "lm_head" in name]
    optimisers = [Muon(matrices, peak), torch.optim.AdamW(others, lr=peak / 10, betas=(0.9, 0.98), weight_decay=0.0)]
    draws = torch.Generator().manual_seed(seed)
    begin = 0
    if state is not None and state.exists():
        kept = torch.load(state)
        begin = kept["step"]
        head.load_state_dict(kept["head"])
        draws.set_state(kept["draws"])
        for optimiser, each in zip(optimisers, kept["optimisers"], strict=True):
            optimiser.load_state_dict(each)
    began = time.perf_counter()
    for step in range(begin, steps if stop is None else stop):
        share = min((step + 1) / max(1, steps // 30), 1.0)
        decay = max(0.02, 0.5 * (1 + math.cos(math.pi * step / steps)))
        for optimiser, most in zip(optimisers, (peak, peak / 10), strict=True):
            optimiser.param_groups[0]["lr"] = most * share * decay
        chosen = torch.randint(0, len(data.train), (rows,), generator=draws).tolist()
        each = losses(head, data.batch([data.train[i] for i in chosen]))
        torch.stack([loss * FADE**j for j, loss in enumerate(each)]).sum().backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        done = step + 1
        if done % 20 == 0 or done == steps:
            nats = " ".join(f"{loss.item():.3f}" for loss in each)
            report(f"step {done}/{steps} nats {nats} {time.perf_counter() - began:.0f} s")
        if done % every == 0 or done == steps:
            if state is not None:
                optimiser_states = [optimiser.state_dict() for optimiser in optimisers]
                whole = {"step": done, "head": head.state_dict(), "draws": draws.get_state()}
                torch.save({**whole, "optimisers": optimiser_states}, state.with_suffix(".new"))
                os.replace(state.with_suffix(".new"), state)
            keep(head)
            if data.held:
                report(f"step {done} accepted {[round(x, 3) for x in acceptance(head, data, 32)]}")
    return head


def config(shape: Shape, target: Target, raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of config.json as the speculators package writes it. `raw` is the target's."""
    mine = {name: value for name, value in asdict(shape).items() if name not in ("aux", "draft_vocab_size")}
    layer = {**raw, **mine, "num_hidden_layers": 1, "tie_word_embeddings": False}
    return {
        "architectures": ["Eagle3DraftModel"],
        "model_type": "speculator_model",
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": STEPS}],
            "verifier": {"architectures": raw["architectures"], "name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct"},
        },
        "transformer_layer_config": {name: value for name, value in layer.items() if name != "architectures"},
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.aux),
        "norm_before_residual": True,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def save(head: Head, ids: torch.Tensor, raw: dict[str, Any], out: Path) -> None:
    """Writes a directory that `speculators` and kvferry's drafter can read."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().bfloat16().contiguous() for name, value in head.state_dict().items()}
    weights["d2t"] = ids - torch.arange(len(ids))
    weights["t2d"] = torch.zeros(head.target.vocab, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(weights, out / "model.safetensors.new", metadata={"format": "pt"})
    os.replace(out / "model.safetensors.new", out / "model.safetensors")
    written = json.dumps(config(head.shape, head.target, raw), indent=2)
    (out / "config.json").write_text(written + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("generate", "train"))
    parser.add_argument("work", type=Path, help="the folder for the target's answers, 150 MB per part")
    parser.add_argument("out", type=Path, nargs="?", help="the folder for the head; needed by train")
    parser.add_argument("--model", default="smollm2", help="the target, as for `kvferry serve`")
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--rows", type=int, default=128, help="prompts per batch")
    parser.add_argument("--answers", type=int, default=8, help="answers per training step")
    parser.add_argument("--prompt", type=int, default=48, help="tokens of a prompt that is not a question")
    parser.add_argument("--stop", type=int, default=240, help="tokens of prompt and answer together")
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--peak", type=float, default=0.01, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=20261129)
    args = parser.parse_args(arguments)
    from kvferry.engines.mini.models.catalog import model_directory

    torch.set_num_threads(1)
    directory, shape = model_directory(args.model), Shape()

    report = partial(print, flush=True)
    if args.what == "generate":
        sizes = {"batches": args.batches, "rows": args.rows, "prompt": args.prompt, "stop": args.stop}
        generate(directory, args.work, **sizes, seed=args.seed, aux=shape.aux, report=report)
        return
    if args.out is None:
        parser.error("train needs the argument OUT, the folder for the head")
    data, target = Data(args.work, directory, shape), Target.read(directory)
    report(f"{len(data.train)} answers, {len(data.held)} held out, the vocabulary covers {data.covered:.3f} of them")
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    train(
        data,
        target,
        steps=args.steps,
        rows=args.answers,
        seed=args.seed,
        peak=args.peak,
        state=args.work / "state.pt",
        report=report,
        keep=lambda head: save(head, data.ids, raw, args.out),
    )


if __name__ == "__main__":
    main()
