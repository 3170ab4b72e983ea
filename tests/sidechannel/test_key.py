"""The shared key, and which addresses need one."""

import os
import stat
from pathlib import Path

import pytest

from kvferry.errors import ConfigError
from kvferry.settings import SideChannelSettings
from kvferry.sidechannel.shared_key import is_loopback, load_key, new_key, require_key


def test_a_new_key_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    made = new_key(tmp_path / "key")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert load_key(SideChannelSettings(key_file=str(tmp_path / "key"))) == made
    assert made.secret.decode() not in repr(made)
    assert made.public != made.secret
    assert len(made.raw_public) == 32


def test_keys_differ(tmp_path: Path) -> None:
    assert new_key(tmp_path / "a") != new_key(tmp_path / "b")


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    new_key(tmp_path / "key")
    with pytest.raises(ConfigError, match="exists already"):
        new_key(tmp_path / "key")
    with pytest.raises(ConfigError, match="cannot write"):
        new_key(tmp_path / "no" / "key")


def test_where_the_key_comes_from(tmp_path: Path) -> None:
    made, other = new_key(tmp_path / "key"), new_key(tmp_path / "other")
    assert load_key(SideChannelSettings()) is None
    os.environ["KVFERRY_KEY"] = (tmp_path / "key").read_text()
    assert load_key(SideChannelSettings()) == made
    os.environ["KVFERRY_KEY_FILE"] = str(tmp_path / "other")
    assert load_key(SideChannelSettings()) == other
    assert load_key(SideChannelSettings(key_file=str(tmp_path / "key"))) == made


@pytest.mark.parametrize(
    "text", ["", "kvferry-key-1:short", "x" * 40, "kvferry-key-1:" + "~" * 40, "\x00\xff", "kvferry-key-1:" + "#" * 40]
)
def test_invalid_text_is_no_key(text: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(ConfigError, match=r"holds no kvferry key.*kvferry key new FILE") as caught:
        load_key(SideChannelSettings(key_file=str(tmp_path / "key")))
    assert not {"~~~", "###"} & {str(caught.value)[i : i + 3] for i in range(999)}  # most of a secret may be in it


def test_a_missing_file_is_reported_with_the_command_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Make one: kvferry key new .*nothing"):
        load_key(SideChannelSettings(key_file=str(tmp_path / "nothing")))


def test_a_key_that_others_can_read_causes_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    new_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    load_key(SideChannelSettings(key_file=str(tmp_path / "key")))
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("localhost.example.com", False),
        ("127.0.0.1.example.com", False),
        ("*", False),
        ("", False),
    ],
)
def test_which_addresses_are_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_beyond_loopback_a_key_is_required(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'0\.0\.0\.0' can be reached.*kvferry key new FILE"):
        require_key(None, "0.0.0.0", "listen there")
    require_key(None, "127.0.0.1", "listen there")
    require_key(new_key(tmp_path / "key"), "0.0.0.0", "listen there")
