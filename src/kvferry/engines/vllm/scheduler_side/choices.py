"""Decides which of a prompt's choices (`n` above 1) carries its hand-off: they all come with the same parameters.

vLLM makes one request per choice. The first that arrives is the carrier. The others are ordinary requests: on decode
they wait until the carrier's KV is there, and find it in the prefix cache; on prefill they return the carrier's
parameters, because vLLM answers with those of whichever choice ends last.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from kvferry.engines.vllm.scheduler_side.request_params import parent_of

__all__ = ["Choices"]

_MAX_PROMPTS = 512
"""Prompts that are remembered. One that is forgotten while its choices run costs a second hand-off, at worst."""


@dataclass(slots=True)
class _Prompt:
    carrier: str
    returned: dict[str, Any] | None = None


class Choices:
    """One per engine, used on the engine's thread."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, _Prompt] = OrderedDict()

    def arrived(self, request_id: str) -> str | None:
        """Registers a request that has hand-off parameters. Returns the id of its prompt's carrier; None if it is the
        carrier itself.
        """
        parent = parent_of(request_id)
        if parent is None:
            return None
        prompt = self._prompts.get(parent)
        if prompt is not None:
            return None if prompt.carrier == request_id else prompt.carrier
        self._prompts[parent] = _Prompt(request_id)
        if len(self._prompts) > _MAX_PROMPTS:
            self._prompts.popitem(last=False)
        return None

    def carrier_of(self, request_id: str) -> str | None:
        """Returns the carrier for which another choice stands back, or None."""
        prompt = self._prompt(request_id)
        return None if prompt is None or prompt.carrier == request_id else prompt.carrier

    def carrier_returned(self, request_id: str, params: dict[str, Any] | None) -> None:
        """Notes the parameters that prefill has returned for the carrier."""
        prompt = self._prompt(request_id)
        if prompt is not None and prompt.carrier == request_id:
            prompt.returned = params

    def returned_for(self, request_id: str) -> dict[str, Any] | None:
        """Returns the carrier's parameters for another choice of its prompt."""
        prompt = self._prompt(request_id)
        return None if prompt is None else prompt.returned

    def _prompt(self, request_id: str) -> _Prompt | None:
        parent = parent_of(request_id)
        return None if parent is None else self._prompts.get(parent)
