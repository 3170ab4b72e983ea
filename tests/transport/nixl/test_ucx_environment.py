"""Defaults are set only if the operator has set nothing."""

from pathlib import Path

import pytest

from kvferry.transport.nixl import ucx_environment
from kvferry.transport.nixl.ucx_environment import may_read_other_processes, prepare_environment


def test_the_operators_values_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_environment, "may_read_other_processes", lambda: False)
    theirs = {"NIXL_LOG_LEVEL": "DEBUG", "UCX_LOG_FILE": "/dev/null", "UCX_TLS": "rc"}
    environment = dict(theirs)
    assert prepare_environment(environment) == {}
    assert environment == theirs


def test_unset_variables_get_a_default_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_environment, "may_read_other_processes", lambda: False)
    environment: dict[str, str] = {}
    assert prepare_environment(environment) == environment
    assert environment == {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_FILE": "stderr", "UCX_TLS": "^cma"}
    assert prepare_environment(environment) == {}


def test_cma_stays_on_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_environment, "may_read_other_processes", lambda: True)
    assert "UCX_TLS" not in prepare_environment({})


@pytest.mark.parametrize(
    ("scope", "capabilities", "may"),
    [
        (None, "0", True),
        ("0\n", "0", True),
        ("1\n", "0000000000000000", False),
        ("1\n", "0000000000080000", True),
        ("2\n", "000001ffffffffff", True),
        ("nonsense", "000001ffffffffff", False),
    ],
)
def test_reading_another_process_needs_the_permission_of_yama(
    tmp_path: Path, scope: str | None, capabilities: str, may: bool
) -> None:
    if scope is not None:
        (tmp_path / "scope").write_text(scope)
    (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    assert may_read_other_processes(tmp_path / "scope", tmp_path / "status") is may
