"""The salt of a request: what its KV depends on besides its tokens (R38).

Requests with different salts share no KV: not in an engine's own prefix cache, and not between engines. The salt is an
input of block hashes and of prompt digests, so every engine must write the same salt for the same inputs: this is the
one place that does.
"""

from collections.abc import Sequence

__all__ = ["MAX_SALT_CHARS", "make_salt"]

MAX_SALT_CHARS = 1024
"""The longest `cache_salt` that a client may send."""


def make_salt(*, cache_salt: str | None = None, adapter: str | None = None, inputs: Sequence[object] = ()) -> str:
    """Returns the salt as text; "" if the KV depends on nothing but the tokens.

    `cache_salt`: the client's own field. `adapter`: the adapter's name; its path may differ from one machine to the
    next. `inputs`: one tuple per input that is not tokens, such as an image, with its content's hash.
    """
    parts: list[object] = []
    if cache_salt:
        parts.append(("cache_salt", cache_salt))
    if adapter is not None:
        parts.append(("lora", adapter))
    parts += inputs
    return repr(parts) if parts else ""
