"""The hand-off check takes the steps of a fleet's first request, and names the one that fails with its remedy."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.cli.doctor.handoff_check import HandoffCheck
from kvferry.cli.doctor.prefill_end import PrefillEnd
from kvferry.cli.doctor.steps import Step
from kvferry.cli.doctor.tiny_engine import TinyEngine
from kvferry.cli.main import ExitCode
from kvferry.handoff.orders import Landed
from kvferry.settings import FerrySettings, Role, SideChannelSettings, TransferSettings
from kvferry.sidechannel.client import SideChannelClient
from kvferry.sidechannel.shared_key import new_key
from kvferry.wire.params import HandoffParams

SETTINGS = FerrySettings(transfer=TransferSettings(transport="memory", staging_bytes=0))
TOKENS = 100


@pytest.fixture
def prefill_end() -> Iterator[PrefillEnd]:
    end = PrefillEnd(SETTINGS, num_tokens=TOKENS)
    yield end
    end.close()


def check(
    port: int, settings: FerrySettings = SETTINGS, *, num_tokens: int = TOKENS, timeout_s: float = 20.0, **changes: str
) -> list[Step]:
    made = HandoffCheck(
        settings, "127.0.0.1", port,
        num_tokens=num_tokens, timeout_s=timeout_s, transfer_remedy="Mend the wire.", **changes,
    )  # fmt: skip
    return list(made.steps())


def test_both_modes_hand_over_between_unlike_blocks(prefill_end: PrefillEnd) -> None:
    steps = check(prefill_end.port)
    assert [(step.name.split(" at ")[0], step.ok) for step in steps] == [
        ("the prefill end answers", True),
        ("pull: handshake", True),
        ("pull: 100 tokens handed over", True),
        ("pull: every block is free again", True),
        ("push: handshake", True),
        ("push: 100 tokens handed over", True),
        ("push: every block is free again", True),
    ]
    assert "bridged: kv.block_tokens" in steps[1].detail
    assert "cells by digest" in steps[2].detail
    assert all(step.ok for step in check(prefill_end.port)), "the prefill end serves one check after another"


def test_no_answer_names_the_command_for_the_other_side() -> None:
    (step,) = check(9, timeout_s=0.3)
    assert (step.ok, step.code) == (False, ExitCode.UNREACHABLE)
    assert "gave no answer" in step.detail
    assert "kvferry doctor --listen 9" in step.remedy


def test_another_key_is_no_answer(tmp_path: Path) -> None:
    keys = [str(tmp_path / name) for name in ("a.key", "b.key")]
    for key in keys:
        new_key(Path(key))
    ours, theirs = (replace(SETTINGS, side_channel=SideChannelSettings(key_file=key)) for key in keys)
    end = PrefillEnd(theirs, num_tokens=TOKENS)
    try:
        assert all(step.ok for step in check(end.port, theirs))
        (step,) = check(end.port, ours, timeout_s=0.5)
    finally:
        end.close()
    assert (step.ok, step.code) == (False, ExitCode.UNREACHABLE)
    assert "--key-file" in step.remedy


def test_something_else_on_the_port_is_named(prefill_end: PrefillEnd) -> None:
    worker = TinyEngine(Role.PREFILL, SETTINGS, num_tokens=8, block_tokens=8)  # a side channel of an engine
    try:
        port = worker.address["port"]
        assert isinstance(port, int)
        (step,) = check(port)
    finally:
        worker.close()
    assert (step.ok, step.code) == (False, ExitCode.UNREACHABLE)
    assert "is not a `kvferry doctor --listen`" in step.detail


def test_a_refused_pair_gets_the_verdict(prefill_end: PrefillEnd) -> None:
    step = check(prefill_end.port, model="another")[-1]
    assert (step.name, step.ok, step.code) == ("pull: handshake", False, ExitCode.INCOMPATIBLE)
    assert "cannot share a cache: model.id" in step.detail


def test_more_than_the_other_side_has_memory_for(prefill_end: PrefillEnd) -> None:
    (step,) = check(prefill_end.port, num_tokens=TOKENS + 1)
    assert (step.ok, step.code) == (False, ExitCode.ERROR)
    assert "memory for 100 tokens, and 101 were wanted" in step.detail
    assert "--megabytes" in step.remedy


def test_wrong_bytes_are_found(prefill_end: PrefillEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = TinyEngine._computed

    def spoiled(self: TinyEngine, prompt: list[int], index: int) -> object:
        content = computed(self, prompt, index)
        if index == 3 and self._block_tokens == 16:  # on prefill
            content[0, 0, 0, 5, 7] += 1
        return content

    monkeypatch.setattr(TinyEngine, "_computed", spoiled)
    step = check(prefill_end.port)[-1]
    assert (step.name, step.code) == ("pull: 100 tokens handed over", ExitCode.BAD_TRANSFER)
    assert "bytes differ in block 1 of 4, which holds the tokens from 32 on" in step.detail
    assert step.remedy == "Mend the wire."


def test_a_hand_off_that_never_comes_is_given_up(prefill_end: PrefillEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: TinyEngine, prompt: list[int], params: HandoffParams, timeout_s: float) -> Landed:
        return decode(self, prompt, HandoffParams.from_dict({**params.to_dict(), "transfer_id": "another"}), 0.2)

    decode = TinyEngine.decode
    monkeypatch.setattr(TinyEngine, "decode", late)
    step = check(prefill_end.port)[-1]
    assert (step.ok, step.code) == (False, ExitCode.BAD_TRANSFER)


def test_blocks_that_stay_in_use_are_a_finding(prefill_end: PrefillEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    made = HandoffCheck(
        SETTINGS, "127.0.0.1", prefill_end.port, num_tokens=TOKENS, timeout_s=60.0, transfer_remedy="Mend the wire."
    )

    def in_use(_engine: TinyEngine) -> int:
        made._end_s = min(made._end_s, time.monotonic() + 0.4)  # the time is up
        return 3

    monkeypatch.setattr(TinyEngine, "num_blocks_in_use", property(in_use))
    step = list(made.steps())[-1]
    assert (step.name, step.code) == ("pull: every block is free again", ExitCode.BAD_TRANSFER)
    assert step.detail == "3 blocks of prefill and 3 of decode are still in use"


@pytest.mark.parametrize(
    "question",
    [
        b"\xff", b"[]", b"{}", b'{"ask": "sing"}', b'{"ask": "prefill", "mode": "sideways"}',
        b'{"ask": "prefill", "mode": "pull", "tokens": 1e9, "seed": 1, "transfer": "t"}',
        b'{"ask": "prefill", "mode": "pull", "tokens": -1, "seed": 1, "transfer": "t"}',
        b'{"ask": "prefill", "mode": "pull", "tokens": 1, "seed": -1, "transfer": "t"}',
        b'{"ask": "prefill", "mode": "pull", "tokens": 1, "seed": 1, "transfer": 7}',
    ],
)  # fmt: skip
def test_rubbish_is_answered_with_an_error(prefill_end: PrefillEnd, question: bytes) -> None:
    client = SideChannelClient(SETTINGS.side_channel)
    try:
        answer = json.loads(client.ask("127.0.0.1", prefill_end.port, question))
    finally:
        client.close()
    assert list(answer) == ["error"]
    assert all(step.ok for step in check(prefill_end.port))


def test_the_content_of_a_cache_depends_on_token_and_position(prefill_end: PrefillEnd) -> None:
    engine: TinyEngine = next(iter(prefill_end._engines.values()))
    content: Callable[[list[int], int], npt.NDArray[np.float32]] = engine._computed
    same = [1] * 16
    assert np.array_equal(content(same, 0), content(same, 0))
    assert not np.array_equal(content(same, 0), content([*same[:-1], 2], 0))
    assert not np.array_equal(content(same * 2, 0), content(same * 2, 1))
