"""Every committed text file ends as the pre-commit hook requires, and the hook finds what it should."""

import subprocess
from pathlib import Path

import pytest

from tests.harness.repository import ROOT
from tests.packaging.file_hygiene import MAX_BYTES, faults


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"no newline", ": does not end with exactly one newline"),
        (b"two\n\n", ": does not end with exactly one newline"),
        (b"a \nb\n", ":1: trailing space"),
        (b"<" * 7 + b" HEAD\n", ":1: a conflict marker"),
        (b"x" * (MAX_BYTES + 1), ": 500,001 bytes, and at most 500,000 are committed"),
    ],
)
def test_each_fault_is_found(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(content)
    assert faults(path) == [f"{path}{fault}"]


@pytest.mark.parametrize("content", [b"", b"fine\n", b"\0binary"])
def test_a_good_file_has_no_fault(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(content)
    assert faults(path) == []


def test_the_repository_is_clean() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split(
        "\n"
    )
    files = [ROOT / name for name in listed if name and not name.startswith("models/src/")]
    assert [fault for path in files if path.is_file() for fault in faults(path)] == []
