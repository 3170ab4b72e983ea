"""Fixtures that every test gets: a clean environment, and a check that the test leaves nothing behind."""

import os
from collections.abc import Iterator

import pytest

import tests.harness.hypothesis_profile  # noqa: F401  loads its profile
from tests.harness.leaks import Held, left_since
from tests.harness.resident import GivenBack


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread, a process, a socket or shared memory behind, and names what it left.

    The marker `leaves("reason")` switches the check off for a test that cannot help it.
    """
    before = Held.now()
    yield
    if request.node.get_closest_marker("leaves") is None:
        left = left_since(before)
        assert not left, f"the test left behind: {'; '.join(left)}"


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    """Checks at the end of the session that fleets shared by several tests have ended too."""
    before = Held.now()
    yield
    left = [one for one in left_since(before, owned=False) if one.startswith("process ")]
    assert not left, f"the tests left: {'; '.join(left)}"


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """Frees the engines that a test has closed, so that a process of many tests stays small."""
    yield
    _given_back.after_a_test()


_given_back = GivenBack()


@pytest.fixture(autouse=True)
def clean_environ() -> Iterator[None]:
    """Hides the KVFERRY_, UCX_ and NIXL_ variables of the developer's shell from tests."""
    saved = {key: value for key, value in os.environ.items() if key.startswith(("KVFERRY_", "UCX_", "NIXL_"))}
    for key in saved:
        del os.environ[key]
    yield
    for key in [key for key in os.environ if key.startswith(("KVFERRY_", "UCX_", "NIXL_"))]:
        del os.environ[key]
    os.environ.update(saved)
