"""--kv-transfer-config as settings; an unknown key is refused with its name and the keys that are allowed."""

from typing import Any

import pytest

from kvferry.engines.vllm.options import read_options
from kvferry.engines.vllm.supported_versions import SUPPORTED, check_version
from kvferry.errors import ConfigError
from kvferry.settings import FailurePolicy, FerrySettings, Role, TransferMode


def read(extra: dict[str, Any], role: str = "kv_producer", policy: str = "recompute") -> Any:
    return read_options(extra, kv_role=role, failure_policy=policy)


def test_defaults_are_kvferrys_except_for_the_first_token_and_the_staging_memory() -> None:
    options = read({})
    ferry = FerrySettings()
    assert options.ferry.lease == ferry.lease
    assert options.ferry.transfer.mode is TransferMode.PULL
    assert options.ferry.transfer.first_token is False
    assert options.ferry.transfer.staging_bytes == 16 << 20
    assert read({"transfer.staging_bytes": 1 << 20}).ferry.transfer.staging_bytes == 1 << 20
    assert options.role is Role.PREFILL


def test_objects_and_single_settings_are_accepted() -> None:
    one = read({"mode": "push", "lease": {"ttl_s": 8.0, "renew_every_s": 1.0}, "strict": True})
    other = read({"transfer.mode": "push", "lease.ttl_s": 8.0, "lease.renew_every_s": 1.0, "strict": True})
    assert one == other
    assert one.ferry.transfer.mode is TransferMode.PUSH
    assert one.ferry.strict


@pytest.mark.parametrize(("policy", "wanted"), [("fail", FailurePolicy.FAIL), ("recompute", FailurePolicy.RECOMPUTE)])
def test_the_policy_is_that_of_vllm(policy: str, wanted: FailurePolicy) -> None:  # R29
    assert read({}, policy=policy).ferry.transfer.on_failure is wanted


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"modes": "push"}, "holds 'modes', which kvferry does not know: it takes mode, strict"),
        ({"mode.x": 1}, "holds 'mode.x'"),
        ({"lease": {"ttl": 3}}, "kv_connector_extra_config.lease holds 'ttl': it takes ttl_s"),
        ({"lease.ttl_s": "long"}, "kv_connector_extra_config.lease: Expected `float`, got `str` - at `$.ttl_s`"),
        ({"lease.ttl_s": 0.0}, "lease.ttl_s=0.0 must be between 0.01"),
        ({"lease": 3}, "kv_connector_extra_config.lease=3 must be an object of settings"),
        ({"mode": "pul"}, "Invalid enum value 'pul'"),
        ({"mode": "pull", "transfer.mode": "pull"}, "both 'mode' and 'transfer.mode'"),
        ({"lease.ttl_s": 8.0, "lease": {"ttl_s": 8.0}}, "holds lease.ttl_s twice"),
        ({"transfer.on_failure": "fail"}, "use kv_load_failure_policy"),
        ({"transfer.first_token": True}, "cannot take prefill's first token"),
        ({"strict": "yes"}, "kv_connector_extra_config.strict='yes' must be true or false"),
    ],
)
def test_unknown_keys_are_refused(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(extra)
    assert text in str(error.value)


def test_a_role_and_a_policy_that_vllm_does_not_have() -> None:
    with pytest.raises(ConfigError, match="kv_role=None is not one of kv_producer, kv_consumer, kv_both"):
        read_options({}, kv_role=None, failure_policy="fail")
    with pytest.raises(ConfigError, match="kv_load_failure_policy='maybe'"):
        read({}, policy="maybe")


@pytest.mark.parametrize("version", [f"{SUPPORTED[-1]}.0", f"{SUPPORTED[-1]}.3", SUPPORTED[-1]])
def test_a_supported_vllm(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.3", "0.320.1", "1.0.0", "dev"])
def test_another_vllm_is_refused_unless_the_operator_says_so(version: str) -> None:
    with pytest.raises(ConfigError, match=r"is not supported: this kvferry was tested with .*any_version"):
        check_version(version)
    check_version(version, anyway=True)
