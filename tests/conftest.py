"""What every test gets: a clean environment, and a check that a test left no thread and no process behind."""

import os
from collections.abc import Iterator

import pytest

import tests.harness.hypothesis_profile  # noqa: F401  loads its profile


@pytest.fixture(autouse=True)
def clean_environ() -> Iterator[None]:
    """No KVFERRY_ or UCX_ variable of the developer's shell reaches a test."""
    saved = {key: value for key, value in os.environ.items() if key.startswith(("KVFERRY_", "UCX_", "NIXL_"))}
    for key in saved:
        del os.environ[key]
    yield
    for key in [key for key in os.environ if key.startswith(("KVFERRY_", "UCX_", "NIXL_"))]:
        del os.environ[key]
    os.environ.update(saved)
