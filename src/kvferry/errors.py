"""Every error that this package raises, grouped by who must act.

* FerryError
  + ConfigError            the operator must change a setting
  + UnknownModel           the operator must name another model, or install one
  + PeerError              the other engine, or the network, is at fault
    - IncompatiblePeer     the two engines do not fit; the verdict says why
    - MalformedMessage     a message that no correct peer sends
    - PeerLost             the peer does not answer, or has gone
  + TransferError          bytes did not arrive; the request can be recomputed
  + RequestError           the client must change the request
    - RequestTooLong       prompt and answer do not fit the model's context
  + Overloaded             there is no room now; the client must try again later
  + RanksLost              a process of this engine has died; the engine restarts or ends, and the client may try again
    - RankRaised           it has died of an exception in a step, which one of the step's requests may cause
"""

__all__ = [
    "ConfigError",
    "FerryError",
    "IncompatiblePeer",
    "MalformedMessage",
    "Overloaded",
    "PeerError",
    "PeerLost",
    "RankRaised",
    "RanksLost",
    "RequestError",
    "RequestTooLong",
    "TransferError",
    "UnknownModel",
]


class FerryError(Exception):
    """The root of all errors. Its text states the fact with the values, then a remedy that a person can type."""


class ConfigError(FerryError):
    """A setting is wrong, alone or in combination with another one."""


class UnknownModel(FerryError):
    """There is no model at the given path or name, or it is one that cannot be run."""


class PeerError(FerryError):
    """The other engine, or the network between, is at fault."""


class IncompatiblePeer(PeerError):
    """The two engines cannot share a cache. The message names every fact that differs."""


class MalformedMessage(PeerError):
    """A message that no correct peer sends: wrong type, size, range or order."""


class PeerLost(PeerError):
    """The peer does not answer, or has gone."""


class TransferError(FerryError):
    """Not all bytes arrived. The request can be recomputed."""


class RequestError(FerryError):
    """The client must change the request. It becomes HTTP 400."""


class RequestTooLong(RequestError):
    """The prompt, or the prompt and the answer, do not fit the model's context."""


class Overloaded(FerryError):
    """There is no room now. It becomes HTTP 503 with Retry-After."""


class RanksLost(FerryError):
    """A process of this engine has died, and the others were ended."""


class RankRaised(RanksLost):
    """A process of this engine has ended with an exception, though no other was killed before."""
