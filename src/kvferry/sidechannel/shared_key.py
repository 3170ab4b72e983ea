"""The key that the engines of a fleet share, and the rule for which addresses need it.

The key is one CURVE (Curve25519) secret, from which its public half follows. Both ends of every side channel use the
same pair: the client and the server each prove that they have the secret, and everything between them is encrypted.
There is one pair per fleet and not one per engine, because engines come and go, and public keys would have to be
distributed. The price is that a single engine cannot be locked out; the fleet needs a new key instead. The cryptography
is libzmq's CurveZMQ.
"""

import ipaddress
import logging
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from kvferry.errors import ConfigError
from kvferry.settings import SideChannelSettings

__all__ = ["SharedKey", "is_loopback", "load_key", "new_key", "require_key"]

logger = logging.getLogger(__name__)

_PREFIX = "kvferry-key-1:"
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True, slots=True)
class SharedKey:
    """A CURVE key pair in Z85, 40 characters each. The secret half is left out of repr, and so of logs."""

    public: bytes
    secret: bytes = field(repr=False)

    @property
    def raw_public(self) -> bytes:
        """The public half as 32 bytes, as ZAP passes it."""
        return z85.decode(self.public)


def new_key(path: Path) -> SharedKey:
    """Writes a new key to a file that only its owner can read. Raises ConfigError if the file exists."""
    _, secret = zmq.curve_keypair()
    text = (
        "# The key that all engines of one kvferry fleet share. It gives access to users' prompts: keep it secret.\n"
        f"{_PREFIX}{secret.decode()}\n"
    )
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{str(path)!r} exists already, and engines may use it: choose another name") from error
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}. Choose another path") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return _parse(text, str(path))


def load_key(settings: SideChannelSettings) -> SharedKey | None:
    """Returns the key in settings.key_file, in the file that KVFERRY_KEY_FILE names, or in KVFERRY_KEY; None if none is
    set.

    Raises ConfigError for a file that cannot be read, and for text that is not a key.
    """
    name = settings.key_file or os.environ.get("KVFERRY_KEY_FILE")
    if not name:
        text = os.environ.get("KVFERRY_KEY")
        return _parse(text, "KVFERRY_KEY") if text else None
    path = Path(name)
    try:
        text = path.read_text(errors="replace")
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"side_channel.key_file={name!r} cannot be read: {error.strerror}. Make one: kvferry key new {name}"
        ) from error
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        # This is not an error: secrets that a container platform mounts are often readable for all in the container.
        logger.warning("others on this machine can read the key file=%s: chmod 600", name)
    return _parse(text, name)


def _parse(text: str, where: str) -> SharedKey:
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith(_PREFIX)]
    secret = lines[0].removeprefix(_PREFIX) if len(lines) == 1 else ""
    # The text itself is not shown: it may be most of a secret.
    reason = f"{where!r} holds no kvferry key (one line that begins with {_PREFIX}). Make one: kvferry key new FILE"
    if not _Z85.fullmatch(secret):
        raise ConfigError(reason)
    try:
        return SharedKey(zmq.curve_public(secret.encode()), secret.encode())
    except zmq.ZMQError as error:  # the characters are valid, but five of them encode more than 32 bits: a typing error
        raise ConfigError(reason) from error


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach an address. It resolves no names; the only name is `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_key(key: SharedKey | None, host: str, doing: str) -> None:
    """Raises ConfigError for an address beyond loopback without a key."""
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"side_channel.host={host!r} can be reached from other machines, and without a key anyone there could read "
            f"users' prompts: refusing to {doing}. Make a key with `kvferry key new FILE` and give it to every engine "
            "(--key-file FILE, or KVFERRY_KEY_FILE=FILE), or use 127.0.0.1"
        )
