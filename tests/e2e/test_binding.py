"""R51 on real processes: a hand-off is bound to its tokens, also while workers of two versions serve together.

`make binding` asks a thousand pairs (tests/e2e/foreign_prompts.py).
"""

from pathlib import Path

import pytest

from tests.e2e.foreign_prompts import FLAGS, peer_params, run
from tests.harness.client import complete
from tests.harness.fleet import Fleet
from tests.harness.foreign_prompts import KINDS
from tests.harness.vllm_models import make_model

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(300)]

OLD = ("--protocol-max", "3")
PROMPT = list(range(10, 90))


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_no_wrong_token_and_no_poisoned_cache_for_pairs_of_prompts(mode: str, tmp_path: Path) -> None:
    tally = run(tmp_path, mode, 2 * len(KINDS))
    assert tally.good, tally.to_json()
    assert tally.handed_over > 100  # common prefixes are still handed over
    assert any("differs after" in reason for reason in tally.reasons)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("older", ["prefill", "decode"])
def test_a_rolling_upgrade_hands_over_in_both_modes(mode: str, older: str, tmp_path: Path) -> None:  # R11
    model = str(make_model(tmp_path / "model"))
    flags = {older: OLD}
    with Fleet(tmp_path / "fleet", *FLAGS, model=model, mode=mode) as fleet:
        prefill = fleet.worker("p", *flags.get("prefill", ()), role="prefill")
        decode = fleet.worker("d", *flags.get("decode", ()), role="decode")
        for worker in (prefill, decode):
            worker.wait_ready()
        fleet.route(prefill=[prefill], decode=[decode])
        assert peer_params(prefill)["remote_engine_id"] == "p"
        answer = complete(fleet.url, PROMPT, max_tokens=4, ignore_eos=True, model="model")
        assert answer.kvferry["handed_over"] == len(PROMPT), answer
        for length, handed_over in ((len(PROMPT), len(PROMPT)), (len(PROMPT) - 1, 0)):  # the number is all there is
            prompt = [500 - token for token in PROMPT]
            fields = {"do_remote_decode": True, "transfer_id": f"x{length}"}
            params = complete(prefill.url, prompt, max_tokens=1, model="model", kv_transfer_params=fields).params
            assert params is not None
            asked = [*prompt[: length - 1], 7]
            answer = complete(decode.url, asked, max_tokens=4, model="model", kv_transfer_params=params)
            assert answer.status == 200
            assert answer.kvferry["handed_over"] == handed_over, answer


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_older_peers_can_be_refused(mode: str, tmp_path: Path) -> None:
    refuse = ("--older-peers", "refuse")
    tally = run(tmp_path, mode, len(KINDS), prefill_flags=(*OLD, *refuse), decode_flags=refuse)
    assert tally.good, tally.to_json()
    assert tally.handed_over == 0
