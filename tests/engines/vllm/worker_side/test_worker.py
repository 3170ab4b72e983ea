"""The worker half warns at its start of what vLLM's CPU build itself does wrong."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

if os.environ.get("KVFERRY_TEST_VLLM") != "1":
    pytest.skip("it needs vLLM's own environment: make test-vllm", allow_module_level=True)
pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make test-vllm")

from kvferry.engines.vllm.worker_side.worker import _warn_of_rope

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize(
    ("text", "warned"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, True),
        ({"rope_theta": 10000.0}, True),
        ({"rope_parameters": {"rope_type": "deepseek_yarn", "factor": 4.0}}, False),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, False),
    ],
)
def test_a_rope_that_is_wrong_on_a_cpu_is_reported(
    text: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**text)))
    _warn_of_rope(config)
    assert ("MLA with rope_type 'default'" in caplog.text) is warned
