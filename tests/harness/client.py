"""A small blocking HTTP client for tests, for any thread: it returns a completion, streamed or not, as one record."""

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Answer", "Stream", "complete", "get", "metrics", "post"]


@dataclass(slots=True)
class Answer:
    """The answer that a client got. `whole` means that it ended as a good answer ends."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    kvferry: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    broken: str = ""
    """How the connection ended, if that was before the end of the answer."""
    body: bytes = b""

    @property
    def whole(self) -> bool:
        """Returns whether it is a 200 with a finish reason, has [DONE] if streamed, and had no error on the way."""
        return self.status == 200 and self.error is None and not self.broken and self.done and bool(self.finish_reason)

    @property
    def clear_error(self) -> bool:
        """Returns whether the client got an OpenAI error body, as the answer or as the last event of a stream."""
        return self.error is not None and bool(self.error.get("message")) and bool(self.error.get("type"))

    def _take(self, body: dict[str, Any]) -> None:
        self.kvferry = body.get("kvferry") or self.kvferry
        self.usage = body.get("usage") or self.usage
        self.params = body.get("kv_transfer_params") or self.params
        for choice in body.get("choices", []):
            self.text += choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            self.token_ids += choice.get("token_ids") or []
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname is not None, url
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)


def _request(
    url: str, method: str, path: str, body: bytes | None, timeout_s: float, headers: Mapping[str, str] | None = None
) -> tuple[int, Any, bytes]:
    connection = _connection(url, timeout_s)
    try:
        sent = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, path, body=body, headers=sent)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def get(url: str, path: str, *, timeout_s: float = 10.0) -> Any:
    """Returns the JSON body of a GET, whatever its status, or {} if there was no answer."""
    try:
        _, _, body = _request(url, "GET", path, None, timeout_s)
    except (OSError, http.client.HTTPException):
        return {}
    return json.loads(body)


def metrics(url: str, *, timeout_s: float = 10.0) -> dict[str, float]:
    """Returns all values of /metrics, or {} if there was no answer."""
    try:
        _, _, body = _request(url, "GET", "/metrics", None, timeout_s)
    except (OSError, http.client.HTTPException):
        return {}
    lines = [line.rsplit(" ", 1) for line in body.decode().splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def post(
    url: str,
    body: object,
    *,
    path: str = "/v1/completions",
    timeout_s: float = 60.0,
    raw: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Sends a POST without streaming. If no answer came, the status is 0."""
    sent = json.dumps(body).encode() if raw is None else raw
    try:
        status, answered, received = _request(url, "POST", path, sent, timeout_s, headers)
    except (OSError, http.client.HTTPException) as error:
        return Answer(0, broken=f"{type(error).__name__}: {error}")
    answer = Answer(status, dict(answered), done=True, body=received)
    try:
        parsed = json.loads(received)
    except ValueError:
        return answer
    answer.error = parsed.get("error")
    answer._take(parsed)
    return answer


class Stream:
    """A streamed completion: iterate over its events, or hang up in the middle."""

    def __init__(
        self, url: str, body: dict[str, Any], *, path: str = "/v1/completions", timeout_s: float = 60.0
    ) -> None:
        self._connection = _connection(url, timeout_s)
        self.answer = Answer(0)
        try:
            sent = json.dumps({**body, "stream": True}).encode()
            self._connection.request("POST", path, body=sent, headers={"Content-Type": "application/json"})
            self._response = self._connection.getresponse()
            self.answer.status = self._response.status
            self.answer.headers = dict(self._response.headers)
        except (OSError, http.client.HTTPException) as error:
            self._broke(error)

    def _broke(self, error: Exception) -> None:
        self.answer.broken = f"{type(error).__name__}: {error}"
        self._connection.close()

    def events(self) -> Iterator[dict[str, Any]]:
        """Yields each event as it arrives, and adds its content to `answer`."""
        if self.answer.broken:
            return
        try:
            if self.answer.status != 200:
                self.answer.body = self._response.read()
                self.answer.error = json.loads(self.answer.body).get("error")
                return
            for line in self._response:
                if not line.startswith(b"data: "):
                    continue
                data = line[6:].strip()
                if data == b"[DONE]":
                    self.answer.done = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    self.answer.error = event["error"]
                self.answer._take(event)
                yield event
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._broke(error)
        finally:
            self._connection.close()

    def hang_up(self) -> None:
        """Closes the connection in the middle of the answer."""
        if self._connection.sock is not None:
            self._connection.sock.close()
        self._response.close()
        self._connection.close()


def complete(
    url: str,
    prompt: Sequence[int] | str,
    *,
    max_tokens: int = 8,
    stream: bool = False,
    timeout_s: float = 60.0,
    **fields: Any,
) -> Answer:
    """Returns a greedy completion with its token ids."""
    body: dict[str, Any] = {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "return_token_ids": True,
        **fields,
    }
    if not stream:
        return post(url, body, timeout_s=timeout_s)
    running = Stream(url, body, timeout_s=timeout_s)
    for _ in running.events():
        pass
    return running.answer
