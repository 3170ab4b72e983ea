"""The check of `make dist`, on small archives; and on the real ones, which take half a minute to build."""

import zipfile
from pathlib import Path

import pytest

from tests.packaging.check_dist import DISTRIBUTIONS, ROOT, build, faults

KVFERRY = DISTRIBUTIONS["."]


def wheel(folder: Path, *extra: str, without: str = "") -> Path:
    path = folder / "kvferry-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in (*KVFERRY.must_hold, "kvferry-0.1.0.dist-info/licenses/LICENSE", *extra):
            if name != without:
                archive.writestr(name, b"")
    return path


def test_a_good_wheel_has_no_fault(tmp_path: Path) -> None:
    assert faults(wheel(tmp_path), KVFERRY) == []


@pytest.mark.parametrize(
    ("extra", "without", "fault"),
    [
        ("tests/test_a.py", "", "tests is not part of kvferry"),
        ("benchmarks/spec.py", "", "benchmarks is not part of kvferry"),
        ("kvferry/model.safetensors", "", "kvferry/model.safetensors holds weights"),
        ("kvferry/__pycache__/a.pyc", "", "kvferry/__pycache__/a.pyc is a left-over"),
        ("", "kvferry/py.typed", "kvferry/py.typed is missing"),
        ("", "kvferry-0.1.0.dist-info/licenses/LICENSE", "LICENSE is missing"),
    ],
)
def test_each_fault_is_found(tmp_path: Path, extra: str, without: str, fault: str) -> None:
    path = wheel(tmp_path, *filter(None, [extra]), without=without)
    assert faults(path, KVFERRY) == [f"{path.name}: {fault}"]


@pytest.mark.slow
@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_the_distributions_contain_what_they_should(tmp_path: Path, folder: str) -> None:
    pytest.importorskip("build", reason="make setup installs it")
    build(ROOT / folder, tmp_path)
    archives = sorted(tmp_path.iterdir())
    assert [path.suffix for path in archives] == [".whl", ".gz"]
    assert [fault for path in archives for fault in faults(path, DISTRIBUTIONS[folder])] == []
