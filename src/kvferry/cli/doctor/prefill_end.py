"""The prefill end of the hand-off check: one tiny engine per transfer mode, and a port on which the other end asks.

The questions are JSON, on a side channel of their own, so they are authenticated and encrypted as all of kvferry's
channels are. The port of `--listen` takes the questions; the next two are the engines' side channels.
"""

import json
import secrets
from collections.abc import Callable
from dataclasses import replace

from kvferry import __version__
from kvferry.cli.doctor.tiny_engine import TOKEN_BYTES, TinyEngine, prompt_of
from kvferry.errors import FerryError
from kvferry.settings import FerrySettings, Role, TransferMode
from kvferry.sidechannel.listener import SideChannelServer

__all__ = ["MAX_TOKENS", "PrefillEnd", "in_mode"]

MAX_TOKENS = (1 << 30) // TOKEN_BYTES
"""The longest prompt that the other end may ask for: 1 GiB of KV."""
BLOCK_TOKENS = 16


def in_mode(settings: FerrySettings, mode: TransferMode, port: int) -> FerrySettings:
    """Returns the settings for an engine of this transfer mode whose side channel listens on `port`."""
    return replace(
        settings,
        transfer=replace(settings.transfer, mode=mode),
        side_channel=replace(settings.side_channel, port=port),
    )


class PrefillEnd:
    """Answers the questions of one decode end at a time, from the moment it is made until `close`."""

    def __init__(
        self,
        settings: FerrySettings,
        *,
        port: int = 0,
        num_tokens: int,
        on_event: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """Listens on `port`, `port + 1` and `port + 2`, or on free ports if it is 0. Raises ConfigError if it cannot.

        `num_tokens` is the longest prompt for which there is memory. `on_event` is called with a line per question.
        """
        assert num_tokens <= MAX_TOKENS, "the caller has checked it"
        self._num_tokens = num_tokens
        self._on_event = on_event
        self._engines: dict[TransferMode, TinyEngine] = {}
        self._server: SideChannelServer | None = None
        try:
            for number, mode in enumerate(TransferMode, start=1):
                self._engines[mode] = TinyEngine(
                    Role.PREFILL,
                    in_mode(settings, mode, port + number if port else 0),
                    num_tokens=num_tokens,
                    block_tokens=BLOCK_TOKENS,
                )
                self._engines[mode].start()
            own = replace(settings.side_channel, port=port)
            self._server = SideChannelServer(own, self._answer, name="kvferry-doctor")
            self._server.start()
        except BaseException:
            self.close()
            raise

    @property
    def port(self) -> int:
        """The port that takes the questions."""
        assert self._server is not None, "it is there from the constructor to close()"
        return self._server.port

    def close(self) -> None:
        """Ends the engines and closes all ports. Idempotent."""
        if self._server is not None:
            self._server.close()
        for engine in self._engines.values():
            engine.close()

    def _answer(self, body: bytes, address: str) -> bytes:
        try:
            question = json.loads(body)
            answer = self._answer_to(question, address)
        except FerryError as error:
            answer = {"error": str(error)}
        except (ValueError, KeyError, TypeError) as error:
            answer = {"error": f"this is no question of `kvferry doctor --peer`: {error!r}"}
        return json.dumps(answer).encode()

    def _answer_to(self, question: dict[str, object], address: str) -> dict[str, object]:
        ask = question["ask"]
        if ask == "engines":
            self._on_event(f"{address} asks for the engines")
            engines = {mode.value: engine.address for mode, engine in self._engines.items()}
            return {"version": __version__, "engines": engines, "max_tokens": self._num_tokens}
        engine = self._engines[TransferMode(str(question["mode"]))]
        if ask == "in_use":
            return {"blocks": engine.num_blocks_in_use}
        if ask != "prefill":
            raise ValueError(f"unknown question {ask!r}")
        num_tokens, seed, transfer = question["tokens"], question["seed"], question["transfer"]
        if not isinstance(num_tokens, int) or not 1 <= num_tokens <= self._num_tokens:
            raise ValueError(f"tokens={num_tokens!r} is not between 1 and {self._num_tokens}")
        if not isinstance(seed, int) or not 0 <= seed < 1 << 32 or not isinstance(transfer, str):
            raise ValueError("seed or transfer is of a wrong type")
        self._on_event(f"{address} asks for {num_tokens} tokens by {question['mode']}")
        params = engine.prefill(prompt_of(num_tokens, seed), transfer or secrets.token_hex(8))
        return {"params": None if params is None else params.to_dict()}
