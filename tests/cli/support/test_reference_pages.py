"""The reference pages match the code. R37."""

import argparse
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from kvferry import settings
from kvferry.cli import route, serve
from kvferry.cli.support.reference_pages import (
    PAGES,
    SETTINGS,
    compatibility_page,
    field_texts,
    flag_of,
    main,
    settings_page,
)
from kvferry.cli.support.worker_flags import FLAGS
from kvferry.handshake.table import FACTS
from kvferry.handshake.verdict import verdict
from kvferry.router.settings import RouterSettings
from kvferry.wire.versions import HISTORY
from tests.harness.handshake_examples import decode_facts, facts
from tests.harness.repository import DOCS


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_up_to_date(name: str) -> None:  # R37
    assert (DOCS / name).read_text() == PAGES[name](), "out of date: make docs"


def test_every_fact_and_version_is_on_the_page() -> None:  # R37
    page = compatibility_page()
    assert all(f"| `{name}`" in page for name in FACTS)
    assert all(line in page for line in HISTORY.values())


@pytest.mark.parametrize("cls", [cls for _, cls in SETTINGS], ids=lambda cls: cls.__name__)
def test_every_setting_is_explained_and_has_a_row(cls: type) -> None:
    names = [field.name for field in dataclasses.fields(cls)]
    texts = field_texts(cls)
    assert [name for name in names if not texts.get(name)] == [], "explain each field beneath it"
    page = settings_page()
    part = next(part for part, other in SETTINGS if other is cls)
    assert [name for name in names if f"| `{part}.{name}`".replace("`.", "`") not in page] == []


@pytest.fixture(scope="module")
def parsers() -> dict[str, argparse.ArgumentParser]:
    found = {}
    for name, command in (("serve", serve), ("route", route)):
        found[name] = argparse.ArgumentParser()
        command.add_arguments(found[name])
    return found


@pytest.mark.parametrize("cls", [cls for _, cls in SETTINGS], ids=lambda cls: cls.__name__)
def test_every_flag_on_the_page_can_be_typed(cls: type, parsers: dict[str, argparse.ArgumentParser]) -> None:
    parser = parsers["route" if cls is RouterSettings else "serve"]
    known = {option for action in parser._actions for option in action.option_strings}
    for field in dataclasses.fields(cls):
        flag = flag_of(cls, field.name)
        assert flag is None or flag == "MODEL" or flag.split()[0] in known, flag


def test_every_flag_of_a_setting_is_on_the_page() -> None:
    page = settings_page()
    assert "| `side_channel.timeout_s` | `--handshake-timeout` | `5.0` |" in page
    assert "| `speculation.method` | `--speculative-config '{\"method\": ...}'` | required |" in page
    assert [flag.name for flag in FLAGS if f"| `--{flag.name}` |" not in page] == []


def test_the_sample_refusal_is_a_real_one() -> None:
    sample = re.search(r"```text\n(.*?)\n```", compatibility_page(), re.DOTALL)
    assert sample is not None
    prefill = facts(speculation=None)
    decode = decode_facts(kv_dtype="fp8_e4m3", speculation=None)
    expected = verdict(prefill, decode).refusal("'prefill-0'", "'decode-0'")
    assert " ".join(sample[1].split()) == expected


def test_every_class_of_settings_is_on_the_page() -> None:
    classes = {cls for _, cls in inspect.getmembers(settings, inspect.isclass) if cls.__name__.endswith("Settings")}
    assert classes <= {cls for _, cls in SETTINGS}


def test_a_field_without_a_text_is_found() -> None:
    assert field_texts(_Unexplained) == {"explained": "This one is."}


@dataclasses.dataclass
class _Unexplained:
    explained: int = 1
    """This one
    is."""
    not_explained: int = 2


def test_check_finds_a_stale_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    assert main(["--out", str(tmp_path), "--check"]) == 0
    (tmp_path / "reference" / "settings.md").write_text("old")
    assert main(["--out", str(tmp_path), "--check"]) == 1
    assert "settings.md is out of date: make docs" in capsys.readouterr().err
