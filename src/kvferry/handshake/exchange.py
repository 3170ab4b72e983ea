"""The handshake as functions from bytes to bytes, without a socket, a clock or memory.

A message is checked in this order (R1, R8): envelope, identity, protocol version, facts (digest, then verdict), and
only then the payload, which is decoded, checked as hostile, and paired. A peer that fails a check gets a refusal with
the reason, and has cost nothing.

The asker sends ASK. The answer is ACCEPT with the answerer's payload; REFUSE or BUSY with a reason; or AGAIN, if the
payload is in a newer protocol version than the answerer speaks: then the asker sends it once more in that version. Both
sides compare the same facts with the same function, so they reach the same verdict.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.errors import IncompatiblePeer, MalformedMessage
from kvferry.handshake.digest import digest
from kvferry.handshake.fact import FactKind
from kvferry.handshake.facts import Fact, Facts
from kvferry.handshake.verdict import Verdict, verdict
from kvferry.ids import EngineId, Incarnation
from kvferry.wire.envelope import MAX_REASON_CHARS, Envelope, Kind, WireFact, decode_envelope, encode_envelope
from kvferry.wire.hello import Hello, decode_hello, encode_hello
from kvferry.wire.versions import HISTORY, ProtocolRange, common_protocol

__all__ = [
    "Accepted",
    "AskAgain",
    "Fit",
    "LocalSide",
    "Refused",
    "ask",
    "busy",
    "examine",
    "judge_ask",
    "judge_reply",
    "refuse",
]

Fit = Callable[[Hello], None]
"""Checks that the layouts of both sides fit, all ranks with all ranks. Raises IncompatiblePeer or MalformedMessage."""


@dataclass(frozen=True, slots=True)
class LocalSide:
    """What this engine reports about itself. It stays the same for the engine's whole life."""

    facts: Facts
    hello: Hello
    fit: Fit
    protocols: ProtocolRange = field(default_factory=ProtocolRange)
    fetch_obstacle: Callable[[Hello], str] = lambda hello: ""
    """Says why prefixes cannot be fetched from a peer that fits; "" if they can."""

    @property
    def engine(self) -> EngineId:
        """Our engine id."""
        return EngineId(self.hello.engine)

    @property
    def incarnation(self) -> Incarnation:
        """Our incarnation."""
        return Incarnation(self.hello.incarnation)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The pair fits. `hello` has been decoded, checked and paired."""

    engine: EngineId
    incarnation: Incarnation
    protocol: int
    hello: Hello
    verdict: Verdict
    """The verdict, in which a is this engine and b is the peer."""
    fetch_obstacle: str = ""
    """Why prefixes cannot be fetched from the peer; "" if they can."""


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Our payload was in a version that the peer does not speak. It must be sent again in this one."""

    protocol: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The pair does not fit, or the peer's message is malformed. `engine` is None if not even that is known."""

    reason: str
    engine: EngineId | None = None
    incarnation: Incarnation | None = None
    verdict: Verdict | None = None
    temporary: bool = False
    """True if nothing was compared because the peer is busy."""


def ask(local: LocalSide, protocol: int | None = None) -> bytes:
    """Returns an ASK message, with our payload in version `protocol` (by default the newest that we speak)."""
    protocol = local.protocols.newest if protocol is None else protocol
    return encode_envelope(_envelope(local, Kind.ASK, protocol=protocol, payload=encode_hello(local.hello, protocol)))


def refuse(local: LocalSide, reason: str) -> bytes:
    """Returns the answer to a peer that does not fit. It has all our facts, so that the peer reaches the same
    verdict."""
    return encode_envelope(_envelope(local, Kind.REFUSE, reason=reason[:MAX_REASON_CHARS]))


def busy(engine: str, incarnation: str, reason: str) -> bytes:
    """Returns the answer of an engine that is too busy to compare. It is cheap, because it has no facts."""
    return encode_envelope(
        Envelope(
            kind=Kind.BUSY,
            engine=engine,
            incarnation=incarnation,
            protocol_min=0,
            protocol_max=0,
            protocol=0,
            digest=b"",
            facts=(),
            reason=reason[:MAX_REASON_CHARS],
        )
    )


def examine(local: LocalSide, envelope: Envelope) -> tuple[int, Verdict] | Refused:
    """Checks the protocol and the facts of a peer, without decoding its payload.

    Returns the version to speak and the verdict, or the refusal.
    """
    who = EngineId(envelope.engine), Incarnation(envelope.incarnation)
    protocol = common_protocol(local.protocols, envelope.protocol_min, envelope.protocol_max)
    if protocol is None:
        ours = local.protocols
        older = "this one" if ours.newest < envelope.protocol_min else f"{envelope.engine!r}"
        return Refused(
            f"{local.engine!r} speaks protocol versions {ours.oldest} to {ours.newest}, and {envelope.engine!r} speaks "
            f"{envelope.protocol_min} to {envelope.protocol_max}: there is no common version. Upgrade kvferry on the "
            f"older side, {older} (newest here: {ours.newest}, {HISTORY[ours.newest]})",
            *who,
        )
    try:
        facts = _facts(envelope)
    except MalformedMessage as error:
        return Refused(f"{envelope.engine!r} reports facts that cannot be read: {error}", *who)
    if digest(facts) != envelope.digest:
        return Refused(
            f"{envelope.engine!r} sent a digest that is not the digest of its own facts: the message was changed on "
            "the way, or its kvferry is faulty. Install the same release on both sides",
            *who,
        )
    answer = verdict(local.facts, facts)
    if answer.refused:
        return Refused(answer.refusal(repr(str(local.engine)), repr(envelope.engine)), *who, answer)
    return protocol, answer


def judge_ask(local: LocalSide, envelope: Envelope) -> tuple[bytes, Accepted | AskAgain | Refused]:
    """Answers an ASK whose envelope is decoded. Returns the reply and the outcome. No peer can make it raise."""
    who = EngineId(envelope.engine), Incarnation(envelope.incarnation)
    if envelope.kind is not Kind.ASK:
        result = Refused(f"{envelope.engine!r} sent {str(envelope.kind)!r}; expected 'ask'", *who)
        return refuse(local, result.reason), result
    outcome = examine(local, envelope)
    if isinstance(outcome, Refused):
        return refuse(local, outcome.reason), outcome
    protocol, answer = outcome
    if envelope.protocol != protocol:
        return encode_envelope(_envelope(local, Kind.AGAIN, protocol=protocol)), AskAgain(protocol)
    judged = _judge_payload(local, envelope, protocol, answer)
    if isinstance(judged, Refused):
        return refuse(local, judged.reason), judged
    payload = encode_hello(local.hello, protocol)
    return encode_envelope(_envelope(local, Kind.ACCEPT, protocol=protocol, payload=payload)), judged


def judge_reply(local: LocalSide, body: bytes, *, asked_protocol: int) -> Accepted | AskAgain | Refused:
    """Returns the outcome of the answer to our ASK. No peer can make it raise."""
    try:
        envelope = decode_envelope(body)
    except MalformedMessage as error:
        return Refused(str(error))
    who = EngineId(envelope.engine), Incarnation(envelope.incarnation)
    if envelope.kind is Kind.BUSY:
        return Refused(f"{envelope.engine!r} is busy: {envelope.reason}", *who, temporary=True)
    outcome = examine(local, envelope)
    if isinstance(outcome, Refused):
        return outcome
    protocol, answer = outcome
    if envelope.kind is Kind.REFUSE:
        return Refused(f"{envelope.engine!r} refuses: {envelope.reason}", *who, answer)
    if envelope.kind is Kind.AGAIN:
        if envelope.protocol != protocol or protocol == asked_protocol:
            return Refused(
                f"{envelope.engine!r} asks for protocol {envelope.protocol}, but the common version is {protocol}",
                *who,
            )
        return AskAgain(protocol)
    if envelope.kind is not Kind.ACCEPT or envelope.protocol != protocol:
        return Refused(
            f"{envelope.engine!r} answered {str(envelope.kind)!r} in protocol {envelope.protocol}; "
            f"expected 'accept' in protocol {protocol}",
            *who,
        )
    return _judge_payload(local, envelope, protocol, answer)


def _judge_payload(local: LocalSide, envelope: Envelope, protocol: int, answer: Verdict) -> Accepted | Refused:
    """Decodes and checks the payload, after facts and version have been accepted."""
    who = EngineId(envelope.engine), Incarnation(envelope.incarnation)
    try:
        hello = decode_hello(envelope.payload, protocol)
        if (hello.engine, hello.incarnation) != (envelope.engine, envelope.incarnation):
            raise MalformedMessage(
                f"the payload is from {hello.engine!r} ({hello.incarnation!r}), but its envelope is from "
                f"{envelope.engine!r} ({envelope.incarnation!r})"
            )
        ours, theirs = local.hello.ranks[0].transport, hello.ranks[0].transport
        if ours != theirs:
            raise IncompatiblePeer(
                f"{local.engine!r} moves bytes by {ours!r} and {envelope.engine!r} by {theirs!r}: "
                "set the same --transport (with vLLM: transfer.transport) on both sides"
            )
        local.fit(hello)
        obstacle = local.fetch_obstacle(hello)
    except (MalformedMessage, IncompatiblePeer) as error:
        return Refused(f"{envelope.engine!r} cannot be paired with {str(local.engine)!r}: {error}", *who, answer)
    return Accepted(*who, protocol, hello, answer, obstacle)


def _envelope(local: LocalSide, kind: Kind, *, protocol: int = 0, payload: bytes = b"", reason: str = "") -> Envelope:
    return Envelope(
        kind=kind,
        engine=local.hello.engine,
        incarnation=local.hello.incarnation,
        protocol_min=local.protocols.oldest,
        protocol_max=local.protocols.newest,
        protocol=protocol,
        digest=digest(local.facts),
        facts=tuple(WireFact(fact.name, str(fact.kind), fact.value) for fact in local.facts),
        payload=payload,
        reason=reason,
    )


def _facts(envelope: Envelope) -> Facts:
    facts: Sequence[WireFact] = envelope.facts
    # A class that only a newer release knows counts as the strictest.
    known = {str(kind): kind for kind in FactKind}
    return Facts(Fact(fact.name, fact.value, known.get(fact.kind, FactKind.MUST_MATCH)) for fact in facts)
