"""The oracle of the embedded engine: the same checkpoint, run by transformers."""

from pathlib import Path
from typing import Any

import torch

__all__ = ["load_oracle"]


def load_oracle(directory: Path) -> Any:
    """Loads a causal language model by transformers, in float32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would leave a thread and a shared lock behind
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
