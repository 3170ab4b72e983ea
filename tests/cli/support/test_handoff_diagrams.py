"""The state diagrams on the page about hand-offs are those of the transition tables."""

import pytest

from kvferry.cli.support.reference_pages import HANDOFF_PAGE, handoff_page, with_diagrams
from tests.harness.repository import DOCS


def test_the_committed_page_has_the_diagrams_of_the_tables() -> None:
    assert (DOCS / HANDOFF_PAGE).read_text() == handoff_page(), "out of date: make docs"


def test_diagrams_that_are_out_of_date_are_rewritten() -> None:
    page = handoff_page()
    stale = page.replace("    [*] --> ", "    [*] --> nowhere, once ")
    assert stale != page
    assert with_diagrams(stale) == page


def test_a_page_without_a_region_is_refused() -> None:
    with pytest.raises(ValueError, match=r"grant.*it needs one"):
        with_diagrams("# A page\n")
