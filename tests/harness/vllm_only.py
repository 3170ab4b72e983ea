"""The beginning of test modules that run in vLLM's own environment: `make test-vllm` sets KVFERRY_TEST_VLLM=1 there."""

import os

import pytest

__all__ = ["VLLM_MARKS", "require_vllm"]

VLLM_MARKS = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def require_vllm() -> None:
    """Skips the calling module outside vLLM's environment, which is apart because vLLM pins many of our packages."""
    if os.environ.get("KVFERRY_TEST_VLLM") != "1":
        pytest.skip("it needs vLLM's own environment: make test-vllm", allow_module_level=True)
    pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make test-vllm")
