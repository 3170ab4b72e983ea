"""The worker half warns at its start of what vLLM's CPU build itself does wrong."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.vllm_only import VLLM_MARKS, require_vllm

require_vllm()

from kvferry.engines.vllm.worker_side.worker import _warn_of_rope

pytestmark = VLLM_MARKS


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
