"""The version stands in one place: `__version__` of the package."""

import re
import tomllib

import kvferry
import kvferry_models
from tests.harness.repository import ROOT


def test_pyproject_reads_the_versions_from_the_packages() -> None:
    for folder, package in ((ROOT, "kvferry"), (ROOT / "models", "kvferry_models")):
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        assert project["project"]["dynamic"] == ["version"]
        assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": f"{package}.__version__"}


def test_versions_have_three_numbers() -> None:
    for version in (kvferry.__version__, kvferry_models.__version__):
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
