"""Transports are found by name, and imported late; a missing package is reported with the command to install it."""

import sys

import pytest

from kvferry.errors import ConfigError
from kvferry.ids import PeerName
from kvferry.transport.memory import MemoryTransport
from kvferry.transport.registry import make_transport


def test_memory_is_found_by_name() -> None:
    transport = make_transport("memory", PeerName("a"))
    assert isinstance(transport, MemoryTransport)
    assert transport.name == "memory"


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"^transport 'rdma' does not exist: choose one of memory, nixl$"):
        make_transport("rdma", PeerName("a"))


def test_a_missing_package_is_reported_with_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kvferry.transport.nixl.nixl", "kvferry.transport.nixl.nixl_errors", "nixl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvferry\[nixl\]'$"):
        make_transport("nixl", PeerName("a"))
