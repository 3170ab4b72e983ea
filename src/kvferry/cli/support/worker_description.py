"""The description of one worker: the facts that it states in a handshake, and the cache layouts of its ranks.

It comes from a live worker (GET /v1/kvferry), from a file that `kvferry facts` saved, or from a model's files.
"""

import base64
import binascii
import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvferry.engines.mini.settings import EngineSettings
from kvferry.errors import ConfigError, IncompatiblePeer, MalformedMessage, PeerLost
from kvferry.handshake.facts import Facts
from kvferry.handshake.fit import layouts_of, make_fit
from kvferry.handshake.fleet_verdict import Member
from kvferry.layout.description import CacheLayout
from kvferry.settings import Role
from kvferry.web.proxies import is_loopback, proxy_of
from kvferry.web.records import Limits
from kvferry.wire.hello import Hello, decode_hello
from kvferry.wire.layout_codec import load_layouts as read_layout_file

__all__ = [
    "WorkerDescription",
    "fetch",
    "is_url",
    "layout_problem",
    "load_description",
    "load_layouts",
    "parse",
    "workers_of_router",
]

TIMEOUT_S = 5.0
MAX_BYTES = 64 << 20
_UNKNOWN = Limits()
_GIVE = "Give a worker's URL (http://...), a file that `kvferry facts` saved, or a model as for `kvferry serve`"

Shape = Callable[[str], EngineSettings]
"""Makes the settings of a worker from the name of its model; see shape_flags."""


class _Raw(msgspec.Struct, frozen=True):
    """The fields of the JSON that are read here."""

    facts: dict[str, msgspec.Raw]
    engine: str = "-"
    incarnation: str = "-"
    role: Role = Role.BOTH
    hello: str = ""
    limits: Limits = Limits()


class _RouterWorker(msgspec.Struct, frozen=True):
    url: str


class _Router(msgspec.Struct, frozen=True):
    workers: tuple[_RouterWorker, ...]


class _Hello(msgspec.Struct, frozen=True):
    hello: str


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """The facts of a worker, and the payload of its handshake if that is known too."""

    member: Member
    hello: Hello | None
    limits: Limits = _UNKNOWN
    """The most that it can hold; all 0 if that is not known, as from an older version."""

    @property
    def facts(self) -> Facts:
        """The facts that it states."""
        return self.member.facts


def is_url(name: str) -> bool:
    """Returns whether this names a live worker."""
    return name.startswith(("http://", "https://"))


def load_description(name: str, shape: Shape | None = None, role: Role = Role.BOTH) -> WorkerDescription:
    """Returns the description of a URL or a file; or, with `shape`, of a worker of a model in this role.

    Raises ConfigError (there is no such file or model), PeerLost (no answer), MalformedMessage (no facts).
    """
    return parse(name, fetch(name) if is_url(name) else _read(name, shape, role))


def load_layouts(name: str, shape: Shape | None = None, role: Role = Role.BOTH) -> tuple[CacheLayout, ...]:
    """Returns the layouts of all ranks of one engine; `name` may also be a file of layouts only.

    Raises as `load_description`, and MalformedMessage for a file that holds no layout.
    """
    if is_url(name):
        return _layouts_in(name, fetch(name))
    path = Path(name)
    if path.is_file() and path.suffix != ".gguf":
        body = _read(name, None, role)
        return _layouts_in(name, body) if _is_description(path, body) else read_layout_file(path)
    return _layouts_in(name, _read(name, shape, role))


def _is_description(path: Path, body: bytes) -> bool:
    return path.suffix == ".json" and b'"kvferry_layouts"' not in body


def _read(name: str, shape: Shape | None, role: Role) -> bytes:
    path = Path(name)
    if shape is not None and (path.is_dir() or path.suffix == ".gguf" or not (path.suffix or path.parent.name)):
        return _describe(shape(name), role)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {name!r}: {error.strerror}. {_GIVE}") from error


def _describe(settings: EngineSettings, role: Role) -> bytes:
    # Imported late: it loads torch, and a URL or a file needs none.
    from kvferry.cli.support.model_description import describe_model
    from kvferry.engines.mini.worker import WorkerSettings

    return msgspec.json.encode(describe_model(WorkerSettings(engine=settings, role=role)))


def fetch(url: str) -> bytes:
    """Returns the body of GET /v1/kvferry, of at most MAX_BYTES within TIMEOUT_S. Raises PeerLost, MalformedMessage."""
    try:
        with _opener(url).open(url.rstrip("/") + "/v1/kvferry", timeout=TIMEOUT_S) as answer:
            body: bytes = answer.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            raise PeerLost(f"{url!r} answers {error.code} {error.reason}. {_remedy(url)}") from error
    except (OSError, ValueError, urllib.error.URLError, http.client.HTTPException) as error:
        # An HTTPException: what answers there does not speak HTTP, or breaks off.
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        text = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason).strip()
        raise PeerLost(f"{url!r} does not answer: {text}. {_remedy(url)}") from error
    if len(body) > MAX_BYTES:
        raise MalformedMessage(f"{url!r} answers with more than {MAX_BYTES} bytes")
    return body


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Returns what opens the URL: without the proxy of the environment if it is on this machine."""
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_loopback(url) else []))


def _remedy(url: str) -> str:
    proxy = proxy_of(url)
    if proxy is None:
        return "Is it the URL of a kvferry worker?"
    host = urllib.parse.urlsplit(url).hostname
    variable = f"{urllib.parse.urlsplit(url).scheme}_proxy"
    return (
        f"It was asked through the proxy {proxy}, which the environment names ({variable}): the answer may be the "
        f"proxy's. To ask the worker directly: export NO_PROXY={host}"
    )


def workers_of_router(body: bytes) -> tuple[str, ...] | None:
    """Returns the URLs of a router's workers, if this body is a router's; None if it is something else."""
    try:
        return tuple(worker.url for worker in msgspec.json.decode(body, type=_Router).workers)
    except msgspec.MsgspecError:
        return None


def parse(name: str, body: bytes) -> WorkerDescription:
    """Returns what was fetched or read. Raises MalformedMessage, which names the place."""
    try:
        raw = msgspec.json.decode(body, type=_Raw)
        facts = Facts.from_json({key: msgspec.json.decode(value) for key, value in raw.facts.items()})
        hello = decode_hello(base64.b64decode(raw.hello, validate=True)) if raw.hello else None
    except (msgspec.MsgspecError, binascii.Error, UnicodeDecodeError, RecursionError, MalformedMessage) as error:
        remedy = "give the URL of a worker" if is_url(name) else "`kvferry facts` saves such a file"
        raise MalformedMessage(f"{name!r} does not hold the facts of a worker: {error}. Remedy: {remedy}") from error
    stated = facts.get("role")
    role = Role(stated) if isinstance(stated, str) and stated in list(Role) else raw.role
    return WorkerDescription(Member(name, raw.engine, raw.incarnation, role, facts), hello, raw.limits)


def _layouts_in(name: str, body: bytes) -> tuple[CacheLayout, ...]:
    try:
        if b'"hello"' not in body and b'"facts"' in body:
            raise MalformedMessage(
                f"{name!r} has facts and no layout. Save it again with this version: kvferry facts URL|MODEL -o FILE"
            )
        hello = base64.b64decode(msgspec.json.decode(body, type=_Hello).hello, validate=True)
    except (msgspec.MsgspecError, binascii.Error, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"{name!r} is neither a layout file nor the description of a worker: {error}") from error
    return layouts_of(decode_hello(hello))


def layout_problem(a: WorkerDescription, b: WorkerDescription) -> str | None:
    """Returns why the layouts of two sides do not fit; None if they do, or if one of them has none."""
    if a.hello is None or b.hello is None:
        return None
    try:
        make_fit(layouts_of(a.hello), a.member.role)(b.hello)
    except (IncompatiblePeer, MalformedMessage) as error:
        return str(error)
    return None
