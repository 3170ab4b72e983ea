"""Every error this package raises, cut by who must act.

* FerryError
  + ConfigError            the operator must change a setting
  + UnknownModel           the operator must name another model, or install one
  + PeerError              the other side, or the wire, is at fault
    - IncompatiblePeer     the pair does not fit; the verdict says why
    - MalformedMessage     bytes that no correct peer sends
    - PeerLost             the peer does not answer, or is gone
  + TransferError          bytes did not arrive; the request can be recomputed
  + RequestError           the client must change the request
    - RequestTooLong       prompt and answer do not fit the model's context
  + Overloaded             nobody's fault: ask again later
  + RanksLost              nobody's fault: a process of this engine has died; it starts again, or ends
"""

__all__ = [
    "ConfigError",
    "FerryError",
    "IncompatiblePeer",
    "MalformedMessage",
    "Overloaded",
    "PeerError",
    "PeerLost",
    "RanksLost",
    "RequestError",
    "RequestTooLong",
    "TransferError",
    "UnknownModel",
]


class FerryError(Exception):
    """The root: one sentence of fact with the values, then the remedy as something a person can type."""


class ConfigError(FerryError):
    """A setting is wrong, alone or beside another one."""


class UnknownModel(FerryError):
    """There is no model where the operator pointed, or it is one that we cannot run."""


class PeerError(FerryError):
    """The other side, or the wire between, is at fault."""


class IncompatiblePeer(PeerError):
    """The two engines cannot share a cache. The message names every fact that differs."""


class MalformedMessage(PeerError):
    """A message that no correct peer sends: wrong type, size, range or order."""


class PeerLost(PeerError):
    """The peer does not answer, or has gone."""


class TransferError(FerryError):
    """Bytes did not arrive whole. The request can be recomputed."""


class RequestError(FerryError):
    """The client must change the request; becomes HTTP 400."""


class RequestTooLong(RequestError):
    """The prompt, or the prompt and the answer, do not fit the model's context."""


class Overloaded(FerryError):
    """There is no room now; becomes HTTP 503 with Retry-After."""


class RanksLost(FerryError):
    """A process of this engine has died, and the others were ended: all that was open in them is lost."""
