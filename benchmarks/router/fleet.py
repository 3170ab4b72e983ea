"""Scripted workers for `benchmarks.router`: as cheap as Python allows, so that the router is what is measured.

They are one process (`python -m benchmarks.router.fleet --ready-file FILE`) with four workers: prefill and decode of a
pull fleet, and of a push fleet. POST /script sets their script and GET /counters reads their counters, on any port.

- Prefill answers after `prefill_ms` with one token and the parameters of a hand-off.
- Decode, if it gets the parameters of a finished prefill (pull), takes `registration_ms` until its first token.
- Decode, if it gets only a transfer id (push), registers for the same time while prefill works; its first token comes
  when both have ended.
- A stream has `chunks` events. Every open stream gets one per `step_ms`, as from the steps of an engine.
"""

import argparse
import asyncio
import re
from collections import OrderedDict
from typing import Any

import msgspec

from kvferry.cli.support.parent_death import die_with_supervisor
from kvferry.web.listen import announce

__all__ = ["Script", "main"]

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MAX_FINISHED = 4096
_EVENT = (
    b'data: {"id":"c-1","object":"text_completion","created":1,"model":"scripted",'
    b'"choices":[{"index":0,"text":" tok","logprobs":null,"finish_reason":null}]}\n\n'
)
_DONE = b"data: [DONE]\n\n"
_ANSWER = msgspec.json.encode(
    {
        "id": "c-1",
        "object": "text_completion",
        "created": 1,
        "model": "scripted",
        "choices": [{"index": 0, "text": " tok" * 16, "finish_reason": "length", "logprobs": None}],
        "usage": {"prompt_tokens": 512, "completion_tokens": 16, "total_tokens": 528},
    }
)


class Script(msgspec.Struct):
    """The behaviour of the workers."""

    prefill_ms: float = 0.0
    registration_ms: float = 0.0
    step_ms: float = 0.0
    chunks: int = 1


class Counters(msgspec.Struct):
    """Numbers of requests since the start, by kind."""

    prefill: int = 0
    pull: int = 0
    """Requests to decode with the parameters that prefill gave."""
    push: int = 0
    """Requests to decode with a transfer id for which prefill writes."""
    alone: int = 0
    """Requests to decode without parameters."""


class _Asked(msgspec.Struct):
    stream: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None


_decode_asked = msgspec.json.Decoder(_Asked).decode


class _Fleet:
    """The state that the four workers share."""

    def __init__(self) -> None:
        self.script = Script()
        self.counters = Counters()
        self.streams: dict[_Connection, int] = {}
        """Open streams, and the number of events that each still gets."""
        self._finished: OrderedDict[str, float] = OrderedDict()
        """Transfers that prefill has finished, and when (time of the event loop)."""
        self._awaited: dict[str, asyncio.Future[None]] = {}

    def finish(self, transfer: str) -> None:
        """Notes that prefill has done its part."""
        loop = asyncio.get_running_loop()
        self._finished[transfer] = loop.time()
        if len(self._finished) > _MAX_FINISHED:
            self._finished.popitem(last=False)
        if (waiting := self._awaited.pop(transfer, None)) is not None and not waiting.done():
            waiting.set_result(None)

    async def wait_finished(self, transfer: str) -> None:
        """Waits until prefill has done its part."""
        if transfer not in self._finished:
            waiting = self._awaited.setdefault(transfer, asyncio.get_running_loop().create_future())
            await waiting

    async def step(self) -> None:
        """Plays the steps of an engine for ever: an event for each open stream per step."""
        while True:
            await asyncio.sleep(self.script.step_ms / 1e3 if self.streams else 0.002)
            for connection, left in list(self.streams.items()):
                if left == 0:
                    del self.streams[connection]
                    connection.write_chunk(_DONE, last=True)
                else:
                    self.streams[connection] = left - 1
                    connection.write_chunk(_EVENT)


class _Connection(asyncio.Protocol):
    """One connection to a worker. Requests come one at a time, because no router pipelines them."""

    def __init__(self, fleet: _Fleet, role: str, mode: str) -> None:
        self._fleet = fleet
        self._role = role
        self._mode = mode
        self._got = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream connection"
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        self._fleet.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._got += data
        end = self._got.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._got[:end]
        found = _LENGTH.search(head)
        length = int(found[1]) if found else 0
        if len(self._got) < end + 4 + length:
            return
        body = self._got[end + 4 : end + 4 + length]
        self._got = self._got[end + 4 + length :]
        method, path = head[:200].split(b" ", 2)[:2]
        self._handle(method, path, body)

    def _handle(self, method: bytes, path: bytes, body: bytes) -> None:
        if method == b"POST" and path.startswith(b"/v1/"):
            if path.endswith(b"completions"):
                self._generate(_decode_asked(body))
            else:
                self._answer(b"{}")
        elif path == b"/script":
            self._fleet.script = msgspec.json.decode(body, type=Script)
            self._answer(b"{}")
        elif path == b"/counters":
            self._answer(msgspec.json.encode(self._fleet.counters))
        elif path == b"/v1/kvferry":
            self._answer(msgspec.json.encode(self._info()))
        elif path == b"/v1/models":
            self._answer(b'{"object":"list","data":[{"id":"scripted","object":"model","created":1,"owned_by":"vllm"}]}')
        elif path == b"/version":
            self._answer(b'{"version":"0.32.0"}')  # for routers that ask which engine this is
        elif path.startswith(b"/health"):
            self._answer(b"{}")
        else:
            self._answer(b"{}", status=b"404 Not Found")

    def _info(self) -> dict[str, Any]:
        return {
            "engine": f"scripted-{self._role}",
            "incarnation": "1",
            "role": self._role,
            "mode": self._mode,
            "model": "scripted",
            "side_channel": {"host": "127.0.0.1", "port": 1},
        }

    def _generate(self, asked: _Asked) -> None:
        script, counters = self._fleet.script, self._fleet.counters
        params = asked.kv_transfer_params or {}
        if self._role == "prefill":
            counters.prefill += 1
            transfer = str(params.get("transfer_id") or "none")
            if script.prefill_ms:
                asyncio.get_running_loop().call_later(script.prefill_ms / 1e3, self._answer_prefill, transfer)
            else:
                self._answer_prefill(transfer)
        elif params.get("transfer_mode") == "push":
            counters.push += 1
            asyncio.ensure_future(self._register(str(params["transfer_id"]), bool(asked.stream)))  # noqa: RUF006
        else:
            delay_ms = script.registration_ms
            if params.get("remote_block_ids"):
                counters.pull += 1
            else:
                counters.alone += 1
                delay_ms = script.prefill_ms
            if delay_ms:
                asyncio.get_running_loop().call_later(delay_ms / 1e3, self._begin, bool(asked.stream))
            else:
                self._begin(bool(asked.stream))

    async def _register(self, transfer: str, stream: bool) -> None:
        if self._fleet.script.registration_ms:
            await asyncio.sleep(self._fleet.script.registration_ms / 1e3)
        await self._fleet.wait_finished(transfer)
        self._begin(stream)

    def _answer_prefill(self, transfer: str) -> None:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_mode": self._mode,
            "transfer_id": transfer,
            "remote_engine_id": "scripted-prefill",
            "remote_request_id": "r-1",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "remote_block_ids": [[*range(32)]],
            "remote_num_tokens": 512,
            "tp_size": 1,
            "pp_size": 1,
        }
        self._answer(_ANSWER[:-1] + b',"kv_transfer_params":' + msgspec.json.encode(params) + b"}")
        self._fleet.finish(transfer)

    def _begin(self, stream: bool) -> None:
        if not stream:
            self._answer(_ANSWER)
            return
        self._write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
        )
        self._fleet.streams[self] = self._fleet.script.chunks - 1

    def write_chunk(self, data: bytes, *, last: bool = False) -> None:
        """Writes one chunk of a chunked body."""
        self._write(b"%x\r\n%b\r\n%b" % (len(data), data, b"0\r\n\r\n" if last else b""))

    def _answer(self, body: bytes, status: bytes = b"200 OK") -> None:
        self._write(
            b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
        )

    def _write(self, data: bytes) -> None:
        assert self._transport is not None, "set before any data"
        self._transport.write(data)


async def _serve(ready_file: str) -> None:
    fleet = _Fleet()
    loop = asyncio.get_running_loop()
    ports = {}
    for mode in ("pull", "push"):
        for role in ("prefill", "decode"):

            def connection(role: str = role, mode: str = mode) -> _Connection:
                return _Connection(fleet, role, mode)

            server = await loop.create_server(connection, "127.0.0.1", 0, backlog=1024)
            ports[f"{mode}_{role}"] = server.sockets[0].getsockname()[1]
    announce(ready_file, ports=ports)
    await fleet.step()


def main() -> None:
    """Serves until it is killed, or until the benchmark ends."""
    die_with_supervisor()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ready-file", required=True)
    asyncio.run(_serve(parser.parse_args().ready_file))


if __name__ == "__main__":
    main()
