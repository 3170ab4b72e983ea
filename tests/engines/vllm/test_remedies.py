"""Each remedy for vLLM is typed: its flags are vLLM's, and vLLM's own parser takes the values. R10."""

import shlex
from dataclasses import fields

import pytest

from tests.harness.vllm_only import VLLM_MARKS, require_vllm

require_vllm()

from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvferry.handshake.fact import FactKind
from kvferry.handshake.table import FACTS
from kvferry.handshake.verdict import verdict
from tests.handshake.test_flips import FLIPS, R2_FACTORS, R4_FACTORS
from tests.harness.handshake_examples import decode_facts, facts

pytestmark = VLLM_MARKS

TYPED = sorted(
    ({name for name, spec in FACTS.items() if spec.kind is FactKind.MUST_MATCH} | R2_FACTORS | R4_FACTORS)
    - {"engine.name"}  # two vLLMs cannot differ in it
)
"""The facts that can refuse a pair of vLLMs, some of them in strict mode only."""
NOT_FLAGS = {
    "engine.version": "install version",
    "protocol": "upgrade kvferry",
    "model.tokenizer": "with the same files on both sides",
    "kv.packings": "use the same attention backend",
    "kv.scales": "use the same KV scales",
    "kv.state_dtypes": "--mamba-cache-dtype and --mamba-ssm-cache-dtype",
    "kv.cross_layer_blocks": "VLLM_KV_CACHE_LAYOUT=",
    "kv.layout": "VLLM_KV_CACHE_LAYOUT=",
    "speculation.aux_layers": "eagle_aux_hidden_state_layer_ids",
}
"""Remedies that are no flag of vLLM, and how they begin or what they hold."""


@pytest.mark.parametrize("name", TYPED)
def test_vllm_takes_what_a_remedy_says(name: str) -> None:
    on_prefill, on_decode = FLIPS[name]
    prefill = facts(**{"engine": "vllm", **on_prefill})
    decode = decode_facts(**{"engine": "vllm", **on_decode})
    row = next(row for row in verdict(prefill, decode, strict=True).blocking() if row.fact == name)
    for remedy in (row.remedy_a, row.remedy_b):
        if name in NOT_FLAGS:
            assert NOT_FLAGS[name] in remedy
            continue
        if remedy.startswith("remove "):
            remedy = remedy.removeprefix("remove ").partition(",")[0]
            assert remedy.startswith("--"), remedy
            continue
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        args, unknown = parser.parse_known_args(["--model", "m", *shlex.split(remedy)])
        assert unknown == [], remedy
        if args.speculative_config is not None:
            assert args.speculative_config.keys() <= {field.name for field in fields(SpeculativeConfig)}
