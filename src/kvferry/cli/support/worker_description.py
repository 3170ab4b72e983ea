"""What one worker says of itself, from a saved file or from a live worker's GET /v1/kvferry."""

import base64
import binascii
import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvferry.errors import ConfigError, IncompatiblePeer, MalformedMessage, PeerLost
from kvferry.handshake.facts import Facts
from kvferry.handshake.fit import layouts_of, make_fit
from kvferry.handshake.fleet_verdict import Member
from kvferry.settings import Role
from kvferry.wire.hello import Hello, decode_hello

__all__ = ["Told", "fetch", "is_url", "layout_problem", "load_told", "parse_told"]

TIMEOUT_S = 5.0
MAX_BYTES = 64 << 20


class _Raw(msgspec.Struct, frozen=True):
    """The answer, as far as it is read here."""

    facts: dict[str, msgspec.Raw]
    engine: str = "-"
    incarnation: str = "-"
    role: Role = Role.BOTH
    hello: str = ""


@dataclass(frozen=True, slots=True)
class Told:
    """Facts, and the payload of a handshake where it was saved too."""

    member: Member
    hello: Hello | None

    @property
    def facts(self) -> Facts:
        """Its facts."""
        return self.member.facts


def is_url(name: str) -> bool:
    """Whether it names a live worker."""
    return name.startswith(("http://", "https://"))


def load_told(name: str) -> Told:
    """From a URL or a file. Raises ConfigError (no such file), PeerLost (no answer), MalformedMessage (no facts)."""
    if is_url(name):
        return parse_told(name, fetch(name))
    try:
        body = Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {name!r}: {error.strerror}. Give a worker's URL (http://...) or a file that "
            "`kvferry facts` saved"
        ) from error
    return parse_told(name, body)


def fetch(url: str) -> bytes:
    """GET /v1/kvferry, at most MAX_BYTES within TIMEOUT_S. Raises PeerLost or MalformedMessage."""
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/v1/kvferry", timeout=TIMEOUT_S) as answer:
            body: bytes = answer.read(MAX_BYTES + 1)
    except (OSError, ValueError, urllib.error.URLError, http.client.HTTPException) as error:
        # Of HTTPException: what answers there speaks no HTTP, or breaks off.
        raise PeerLost(f"{url!r} does not answer: {str(error).strip()}. Is it the URL of a kvferry worker?") from error
    if len(body) > MAX_BYTES:
        raise MalformedMessage(f"{url!r} answers with more than {MAX_BYTES} bytes")
    return body


def parse_told(name: str, body: bytes) -> Told:
    """What was fetched or read. Raises MalformedMessage, which names the place."""
    try:
        raw = msgspec.json.decode(body, type=_Raw)
        facts = Facts.from_json({key: msgspec.json.decode(value) for key, value in raw.facts.items()})
        hello = decode_hello(base64.b64decode(raw.hello, validate=True)) if raw.hello else None
    except (msgspec.MsgspecError, binascii.Error, UnicodeDecodeError, RecursionError, MalformedMessage) as error:
        raise MalformedMessage(f"{name!r} does not tell the facts of a worker: {error}") from error
    role = facts.get("role")
    known = Role(role) if isinstance(role, str) and role in list(Role) else raw.role
    return Told(Member(name, raw.engine, raw.incarnation, known, facts), hello)


def layout_problem(a: Told, b: Told) -> str | None:
    """Why the layouts of two sides do not fit; None if they do, or if one of them was saved without."""
    if a.hello is None or b.hello is None:
        return None
    try:
        make_fit(layouts_of(a.hello), a.member.role)(b.hello)
    except (IncompatiblePeer, MalformedMessage) as error:
        return str(error)
    return None
