"""vLLM servers for tests: the harness of the benchmark, and a lab that keeps one pair of servers for many cases.

Everything here starts real vLLM. Two servers need about 4 GB and, on two cores, up to a minute to start: the lab keeps
a pair as long as the next case wants the same one.
"""

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from kvferry.engines.mini.models.catalog import model_directory
from kvferry.errors import FerryError
from tests.engines.vllm.models import KINDS, make_kind
from tests.harness.repository import ROOT
from tests.harness.until import let_threads_run
from tests.harness.vllm_client import Answer, ask, serve_pair
from tests.harness.vllm_servers import VllmServer, VllmSpec, base_environment, free_port, kv_transfer_config
from tests.harness.vllm_zygote import PATCH_VARIABLE, Zygote

__all__ = [
    "READY_S",
    "Answer",
    "Lab",
    "Pair",
    "VllmServer",
    "VllmSpec",
    "alone",
    "ask",
    "default_python",
    "free_port",
    "kv_transfer_config",
    "new_prompt",
    "poll_until",
    "serve_pair",
    "short_times",
]

READY_S = 480.0
"""How long a server may take to start on a busy machine."""
LEASE_S, DEADLINE_S = 8, 10
"""Short, so that whatever waits for a lease or a deadline ends within the test."""


def default_python() -> str:
    """Returns the interpreter with vLLM: KVFERRY_VLLM_PYTHON, else that of the environment in the repository."""
    configured = os.environ.get("KVFERRY_VLLM_PYTHON")
    beside = ROOT / ".venv-vllm" / "bin" / "python"
    return configured or (str(beside) if beside.exists() else sys.executable)


def short_times(connector: str) -> dict[str, Any]:
    """Returns leases and deadlines for kv_connector_extra_config: the same times in the terms of each connector."""
    if connector == "builtin":
        return {"kv_lease_duration": LEASE_S, "push_registration_timeout": DEADLINE_S, "decoder_kv_blocks_ttl": LEASE_S}
    return {
        "lease.ttl_s": float(LEASE_S),
        "lease.renew_every_s": 1.0,
        "lease.quarantine_s": 3.0,
        "lease.standstill_s": 12.0,
        "transfer.deadline_s": float(DEADLINE_S),
    }


def new_prompt(dice: random.Random, num_tokens: int) -> list[int]:
    """The ordinary tokens of models that were made by a script."""
    return dice.choices(range(3, 500), k=num_tokens)


def poll_until(condition: Callable[[], bool], timeout_s: float, every_s: float = 0.2) -> float:
    """Returns the seconds until `condition` held, or -1.0 if it never did."""
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < timeout_s:
        if condition():
            return time.monotonic() - begun_s
        let_threads_run(every_s)
    return -1.0


@dataclass(slots=True)
class Pair:
    """Two ready servers, and the sizes of their logs when the case began."""

    prefill: VllmServer
    decode: VllmServer
    marks: dict[str, int] = field(default_factory=dict)

    @property
    def both(self) -> tuple[VllmServer, VllmServer]:
        """The two servers, prefill first."""
        return self.prefill, self.decode

    def mark_logs(self) -> None:
        """Marks the place in the logs from which lines belong to this case."""
        self.marks = {one.spec.name: len(one.log()) for one in self.both}

    def new_log(self, server: VllmServer) -> str:
        """Returns what a server logged since `mark_logs`."""
        return server.log()[self.marks.get(server.spec.name, 0) :]


class Lab:
    """Models, and at most one pair of servers at a time. Leaving the context ends the servers."""

    def __init__(
        self, connector: str, python: str | None = None, *, stock: bool = False, policy: str | None = None
    ) -> None:
        """`policy` is vLLM's kv_load_failure_policy. `stock`: the servers as they are, with all their stalls.

        Else the built-in connector's three are taken from it, and vLLM's own (its processes wait for each other with
        sched_yield, and starve everything where they outnumber the cores) from every server.
        """
        self.connector = connector
        self.dice = random.Random(20)
        self._policy = policy
        self._python = python or default_python()
        self._scratch = Path(tempfile.mkdtemp(prefix="kvferry-lab-"))
        self._models: dict[str, Path] = {}
        self._pair: Pair | None = None
        self._key: object = None
        self._zygote = Zygote(self._python, base_environment())
        patch = "neutralise" if connector == "builtin" else "neutralise_yield"
        self._env = {} if stock else {PATCH_VARIABLE: patch}

    def model(self, kind: str = "llama") -> Path:
        """Returns one of models.KINDS, made at the first call; or a real model, by its name for `kvferry serve`."""
        if kind not in self._models:
            self._models[kind] = make_kind(kind, self._scratch / kind) if kind in KINDS else model_directory(kind)
        return self._models[kind]

    def spec(self, role: str, default_mode: str, **changes: Any) -> VllmSpec:
        """Returns the spec of a server. `speculation` is `eagle` with the lab's drafter, or a --speculative-config."""
        kind, mode = changes.pop("kind", "llama"), changes.pop("mode", default_mode)
        speculation = changes.pop("speculation", None)
        if speculation == "eagle":
            speculation = {"method": "eagle", "model": str(self.model("eagle")), "num_speculative_tokens": 2}
        if speculation is not None:
            changes["flags"] = (*changes.get("flags", ()), "--speculative-config", json.dumps(speculation))
        extra = {**short_times(self.connector), **changes.pop("extra", {})}
        name = f"{role[0]}{len(self._models)}-{self.dice.randrange(1 << 30):x}"
        return VllmSpec(name=name, python=self._python, model=self.model(kind), connector=self.connector, role=role,
                        mode=mode, policy=changes.pop("policy", self._policy), extra=extra,
                         env={**self._env, **changes.pop("env", {})}, **changes)  # fmt: skip

    def server(self, spec: VllmSpec) -> VllmServer:
        """Returns a server that is not started yet, and will start within seconds. The caller ends it."""
        return VllmServer(spec, zygote=self._zygote)

    def pair(self, mode: str, prefill: dict[str, Any], decode: dict[str, Any]) -> Pair:
        """Returns the pair with these changes; a running one if it is the same and healthy. Raises FerryError."""
        key = (mode, repr(prefill), repr(decode))
        if self._pair is not None and key == self._key and all(one.healthy() for one in self._pair.both):
            self._pair.mark_logs()
            return self._pair
        self.end_pair()
        pair = Pair(
            self.server(self.spec("prefill", mode, **prefill)),
            self.server(self.spec("decode", mode, **decode)),
        )
        self._pair, self._key = pair, key
        for one in pair.both:
            one.start()
        for one in pair.both:
            try:
                one.wait_ready(READY_S)
            except FerryError:
                self.end_pair(keep_logs=True)
                raise
        pair.mark_logs()
        return pair

    def end_pair(self, *, keep_logs: bool = False) -> None:
        """Ends both servers, if there are any."""
        if self._pair is not None:
            for one in self._pair.both:
                one.stop(grace_s=0, keep_log=keep_logs)
        self._pair = self._key = None

    def forget_pair(self) -> None:
        """Says that this case may have done lasting damage, so the next one gets a new pair."""
        self._key = None

    def restart(self, server: VllmServer) -> VllmServer:
        """Starts a server with the name and the ports of one that was killed."""
        again = VllmServer(server.spec, zygote=self._zygote)
        again.port, again.side_port = server.port, server.side_port
        assert self._pair is not None, "restart what a pair has lost"
        if self._pair.prefill is server:
            self._pair.prefill = again
        else:
            self._pair.decode = again
        self._pair.marks[server.spec.name] = 0
        return again.start().wait_ready(READY_S)

    def prompt(self, num_tokens: int) -> list[int]:
        """Returns a prompt that no cache has."""
        return new_prompt(self.dice, num_tokens)

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end_pair()
        self._zygote.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def alone(server: VllmServer, prompt: Sequence[int], max_tokens: int, timeout_s: float = 60.0) -> Answer:
    """Returns the answer of one server without any hand-off, as the reference."""
    return ask(server, prompt, max_tokens=max_tokens, timeout_s=timeout_s)
