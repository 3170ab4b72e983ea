"""Whether KV crosses: a real hand-off in each transfer mode, from a prefill end in another process or machine.

The decode end runs here, with blocks of another size than prefill's. Every step is one that a fleet's first request
takes: the side channel, the handshake and its verdict, the layouts, the grant, the bytes, the digest, the release.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator

from kvferry.cli.doctor.prefill_end import in_mode
from kvferry.cli.doctor.steps import Planned, Step, StepFailed, tried
from kvferry.cli.doctor.tiny_engine import TOKEN_BYTES, TinyEngine, prompt_of
from kvferry.cli.main import ExitCode
from kvferry.connector.peers import PeerStatus
from kvferry.errors import FerryError, TransferError
from kvferry.settings import FerrySettings, Role, TransferMode
from kvferry.sidechannel.client import SideChannelClient
from kvferry.wire.params import HandoffParams

__all__ = ["HandoffCheck"]

BLOCK_TOKENS = 32
_LAST_LOOK_S = 0.5


class HandoffCheck:
    """The steps of the hand-off, with the prefill end at `host:port`. `rates` has the GB/s of each mode afterwards."""

    def __init__(
        self,
        settings: FerrySettings,
        host: str,
        port: int,
        *,
        num_tokens: int,
        timeout_s: float,
        transfer_remedy: str,
        model: str = "doctor",
    ) -> None:
        """`transfer_remedy` says what to change if the bytes do not cross. Raises ConfigError for a bad key."""
        self.rates: dict[str, float] = {}
        self._settings = settings
        self._host, self._port = host, port
        self._num_tokens = num_tokens
        self._end_s = time.monotonic() + timeout_s
        self._remedy = transfer_remedy
        self._model = model
        self._client = SideChannelClient(settings.side_channel)
        self._engines: dict[TransferMode, TinyEngine] = {}
        self._theirs: dict[str, dict[str, object]] = {}

    def steps(self) -> Iterator[Step]:
        """Runs each step when it is asked for, up to the first that fails. Then closes what this end has opened."""
        try:
            yield from tried(self._planned())
        finally:
            for engine in self._engines.values():
                engine.close()
            self._client.close()

    def _planned(self) -> Iterator[Planned]:
        where = f"{self._host}:{self._port}"
        listen = f"Run `kvferry doctor --listen {self._port}` there, with the same --key-file, and open that port."
        yield Planned(f"the prefill end answers at {where}", self._ask_engines, ExitCode.UNREACHABLE, listen)
        for mode in TransferMode:
            yield self._of(mode, "handshake", self._meet, ExitCode.UNREACHABLE, "Open that port there, too.")
            size = f"{self._num_tokens:,} tokens"
            yield self._of(mode, f"{size} handed over", self._hand_over, ExitCode.BAD_TRANSFER, self._remedy)
            yield self._of(mode, "every block is free again", self._check_blocks, ExitCode.BAD_TRANSFER, self._remedy)

    def _of(
        self, mode: TransferMode, name: str, action: Callable[[TransferMode], str], code: ExitCode, remedy: str
    ) -> Planned:
        return Planned(f"{mode}: {name}", lambda: action(mode), code, remedy)

    def _remaining_s(self) -> float:
        remaining_s = self._end_s - time.monotonic()
        if remaining_s <= 0:
            raise TransferError("the time is up (--timeout)")
        return remaining_s

    def _ask(self, **question: object) -> dict[str, object]:
        body = self._client.ask(self._host, self._port, json.dumps(question).encode(), self._remaining_s())
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise StepFailed(
                f"{self._host}:{self._port} is not a `kvferry doctor --listen`", ExitCode.UNREACHABLE,
                "Give --peer the address that `kvferry doctor --listen` printed.",
            )  # fmt: skip
        if "error" in answer:
            raise TransferError(f"the prefill end says: {answer['error']}")
        return answer

    def _ask_engines(self) -> str:
        started_s = time.monotonic()
        answer = self._ask(ask="engines")
        seconds = time.monotonic() - started_s
        engines, most = answer["engines"], answer["max_tokens"]
        assert isinstance(engines, dict), "a prefill end of this release lists them"
        self._theirs = engines
        if isinstance(most, int) and most < self._num_tokens:
            raise StepFailed(
                f"it has memory for {most:,} tokens, and {self._num_tokens:,} were wanted", ExitCode.ERROR,
                f"Give both sides the same --megabytes, {most * TOKEN_BYTES >> 20} or less here.",
            )  # fmt: skip
        return f"kvferry {answer['version']} after {seconds * 1e3:.1f} ms"

    def _meet(self, mode: TransferMode) -> str:
        engine = self._engines[mode] = TinyEngine(
            Role.DECODE,
            in_mode(self._settings, mode, 0),
            num_tokens=self._num_tokens,
            block_tokens=BLOCK_TOKENS,
            model=self._model,
        )
        name, host, port = self._peer(mode)
        started_s = time.monotonic()
        view, notes = engine.meet(name, host, port, self._remaining_s())
        seconds = time.monotonic() - started_s
        if view.status is PeerStatus.REFUSED:
            if "cannot share a cache" in view.reason:
                raise StepFailed(view.reason, ExitCode.INCOMPATIBLE, "Install the same release of kvferry on both.")
            raise FerryError(view.reason)
        bridged = f"; bridged: {notes[0].split(':')[0]}" if notes else ""
        return f"accepted after {seconds * 1e3:.1f} ms{bridged}"

    def _peer(self, mode: TransferMode) -> tuple[str, str, int]:
        address = self._theirs[mode.value]
        # The address that reached the prefill end is the one to use: what it listens on may be a wildcard.
        return str(address["engine"]), self._host, int(str(address["port"]))

    def _hand_over(self, mode: TransferMode) -> str:
        transfer, seed = f"doctor-{secrets.token_hex(8)}", secrets.randbelow(1 << 32)
        prompt = prompt_of(self._num_tokens, seed)
        answer = self._ask(ask="prefill", mode=mode.value, tokens=self._num_tokens, seed=seed, transfer=transfer)
        name, host, port = self._peer(mode)
        params = HandoffParams(
            do_remote_prefill=True,
            transfer_id=transfer,
            transfer_mode=mode,
            remote_engine_id=name,
            remote_host=host,
            remote_port=port,
        )
        if mode is TransferMode.PULL:
            granted = HandoffParams.from_dict(answer["params"])
            params = HandoffParams.from_dict({**granted.to_dict(), "remote_host": host})
        landed = self._engines[mode].decode(prompt, params, self._remaining_s())
        self.rates[mode.value] = round(landed.num_bytes / landed.transfer_s / 1e9, 3)
        return (
            f"{landed.num_bytes / 1e6:.1f} MB in {landed.transfer_s * 1e3:.1f} ms, {self.rates[mode.value]:.2f} GB/s; "
            f"{landed.verified_cells} cells by digest, all by comparison"
        )

    def _check_blocks(self, mode: TransferMode) -> str:
        while True:
            here = self._engines[mode].num_blocks_in_use
            there = self._ask(ask="in_use", mode=mode.value)["blocks"]
            if not here and not there:
                return "on both sides"
            if time.monotonic() > self._end_s - _LAST_LOOK_S:
                raise TransferError(f"{there} blocks of prefill and {here} of decode are still in use")
            time.sleep(0.005)
