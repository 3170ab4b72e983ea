"""The dashboard in a real Chromium, used as a person does: by roles, names and colours, and by keyboard."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvferry.router.app import Router, RouterFiles
from kvferry.web.listen import Listener
from kvferry.web.stages import HandoffTotals
from tests.harness.browser import Page, a_page, chromium_path
from tests.harness.scripted_worker import FAST, fleet
from tests.harness.traced_worker import TracedWorker, a_decode, a_prefill

CHROMIUM = chromium_path()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.process,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium, or set CHROMIUM to one"),
]
CELLS = "[...document.querySelectorAll('.cell')]"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    """Yields one browser for all tests."""
    assert CHROMIUM is not None, "else these tests are skipped"
    async with a_page(CHROMIUM, tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest_asyncio.fixture(loop_scope="module")
async def page(tab: Page) -> Page:
    """Gives each test a fresh list of errors: those of the last page, whose router has ended, are dropped."""
    await tab.go("about:blank")
    tab.complaints.clear()
    return tab


@asynccontextmanager
async def a_fleet(hold: asyncio.Event | None = None) -> AsyncIterator[tuple[str, list[TracedWorker]]]:
    """Yields a pull pair, a push prefill worker that fits no decode worker, and one that is down."""
    totals = {"p0": HandoffTotals(9, 1, 2_000_000_000, 1.0)}
    workers = [
        a_prefill("p0", ("queue", 0.005), ("prefill", 0.02)),
        a_prefill("p-push", ("prefill", 0.0), mode="push"),
        a_prefill("p-down", port=1),
        a_decode("d0", ("handshake", 0.005), ("transfer", 0.01), ("decode", 0.01), hold=hold, totals=totals),
    ]
    async with fleet(*workers) as (url, _):
        yield url, workers


async def complete(url: str, request_id: str, **more: Any) -> None:
    body = {"prompt": "the secret prompt", "max_tokens": 4, **more}
    headers = {"X-Request-Id": request_id}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status == 200
        await answer.read()


def contrast(one: str, other: str) -> float:
    """Returns the contrast of two `rgb(r, g, b)`: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""

    def luminance(colour: str) -> float:
        parts = [float(part) / 255 for part in colour.split("(")[1].rstrip(")").split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


async def test_the_matrix_shows_what_fits_and_why_not_live(page: Page) -> None:
    async with a_fleet() as (url, _):
        await page.go(url + "/ui")
        await page.until(f"{CELLS}.length === 3 && document.querySelector('.cell').dataset.fit === 'yes'")
        fits = await page.js(f"{CELLS}.map(cell => [cell.dataset.fit, cell.querySelector('.state').textContent])")
        # Not by colour alone: each cell has a sign and a word.
        assert fits == [["yes", "✓ fits"], ["no", "✕ refused"], ["down", "– not in use"]]
        assert "transfer mode" in await page.js(f"{CELLS}[1].getAttribute('aria-label')")
        await page.until("document.querySelector('.cell .main').textContent === '2.0 GB/s'")
        assert await page.js("document.getElementById('health').textContent") == "✓ ok"
        before = await page.js("document.getElementById('fig-ended').textContent")
        await complete(url, "live")  # without a reload, the page follows
        await page.until("document.querySelector('#recent .link')?.textContent === 'live'")
        assert (before, await page.js("document.getElementById('fig-ended').textContent")) == ("0", "1")
        assert "secret" not in await page.js("document.body.textContent")
        assert page.complaints == []


async def test_everything_is_reached_by_keyboard_and_the_focus_is_seen(page: Page) -> None:
    async with a_fleet() as (url, _):
        await complete(url, "mine")
        await page.go(url + "/ui")
        await page.until("document.querySelector('#recent .link')?.textContent === 'mine'")
        focused = "document.activeElement"
        seen = []
        for _ in range(12):
            await page.press("Tab")
            seen.append(await page.js(f"({focused}.id || {focused}.className)"))
            outline = await page.js(
                f"getComputedStyle({focused}).outlineStyle + getComputedStyle({focused}).outlineWidth"
            )
            assert outline == "solid3px", (seen[-1], outline)
            if seen[-1] == "cell":
                break
        assert seen[0] == "skip"
        assert seen[-1] == "cell", "the matrix is one stop, entered at its first cell"
        await page.press("ArrowDown")
        assert await page.js(f"{focused}.dataset.fit") == "no"
        await page.press("Enter")
        await page.until("!document.getElementById('detail').hidden")
        assert "start both with the same --transfer-mode" in await page.js(
            "document.getElementById('detail').textContent"
        )
        await page.press("ArrowLeft")
        assert "p-push" in await page.js(f"{focused}.textContent")
        # The focus stays where it is while states arrive.
        await complete(url, "another")
        await page.until("document.querySelectorAll('#recent .link').length === 2")
        assert "p-push" in await page.js(f"{focused}.textContent")
        for _ in range(12):
            await page.press("Tab")
            if await page.js(f"{focused}.className") == "link":
                break
        await page.press("Enter")
        await page.until("!document.getElementById('line').hidden && document.querySelectorAll('#spans tr').length > 5")
        assert await page.js(f"{focused}.id") == "line-close"
        await page.press("Enter")
        await page.until("document.getElementById('line').hidden")
        assert await page.js(f"{focused}.className") == "link", "back where it came from"
        assert page.complaints == []


async def test_a_time_line_shows_where_the_time_went(page: Page) -> None:
    async with a_fleet() as (url, _):
        await complete(url, "mine")
        await page.go(url + "/ui#request=1")
        await page.until("document.querySelectorAll('#spans tr').length > 5")
        names = await page.js(
            "[...document.querySelectorAll('#spans td:first-child')].map(cell => cell.textContent.trim())"
        )
        assert set(names) == {
            "request", "choosing workers", "prefill request", "queue", "prefill", "decode request", "claim", "transfer",
            "decode",
        }  # fmt: skip
        proof = await page.js("document.getElementById('proof').textContent")
        assert "Of 512 prompt tokens 507 were handed over, 0 were cached and 5 were computed." in proof
        shares = await page.js("[...document.querySelectorAll('#legend li')].map(one => one.textContent)")
        assert any(one.startswith("prefill ") for one in shares)
        assert not [one for one in shares if one.endswith(" 0 %")]
        inside = await page.js(
            "[...document.querySelectorAll('#spans .track')].every(track => { const [a, b] = [track, track.firstChild]"
            ".map(one => one.getBoundingClientRect()); return b.left >= a.left - 1 && b.right <= a.right + 3; })"
        )
        assert inside
        assert page.complaints == []


async def test_the_page_follows_its_address(page: Page) -> None:
    shown = "document.getElementById('line-id').textContent"
    async with a_fleet() as (url, _):
        await complete(url, "first")
        await complete(url, "second one")
        await page.go(url + "/")
        assert await page.js("location.pathname") == "/ui"
        await page.until("document.querySelectorAll('#recent .link').length === 2")
        await page.js("location.hash = 'request=1'")  # like a link that is pasted into the address bar
        await page.until(f"{shown}.startsWith('1 · first ·')")
        await page.js("document.querySelector('#recent .link').click()")
        await page.until(f"{shown}.startsWith('2 · second one ·') && location.hash === '#request=2'")
        await page.js("history.back()")
        await page.until(f"{shown}.startsWith('1 · first ·')")
        await page.js("location.hash = 'id=' + encodeURIComponent('second one')")
        await page.until(f"{shown}.startsWith('2 · second one ·')")
        await page.js("history.go(-2)")
        await page.until("location.hash === '' && document.getElementById('line').hidden")
        # A forgotten request is reported as such, without the headings of a time line.
        await page.js("location.hash = 'request=99'")
        await page.until(f"{shown}.includes('is remembered')")
        assert await page.js("document.getElementById('line-body').hidden")
        await page.js("location.hash = 'id=first'")
        await page.until(f"{shown}.startsWith('1 · first ·') && !document.getElementById('line-body').hidden")


async def test_a_narrow_window_shows_bars_and_a_refusal_does_not_grow(page: Page) -> None:
    async with a_fleet() as (url, _):
        try:
            for width in (1400, 420):
                await page.size(width, 900)
                await complete(url, f"at-{width}", stream=True)
                await page.go("about:blank")
                await page.go(f"{url}/ui#id=at-{width}")
                await page.until("document.querySelectorAll('#spans tr').length > 5")
                await page.until(f"{CELLS}.length === 3")
                widest = await page.js(f"Math.max(...{CELLS}.map(cell => cell.getBoundingClientRect().width))")
                assert widest <= 240
                bar = await page.js("document.querySelector('#spans .track').getBoundingClientRect().width")
                assert bar >= 120
                texts = await page.js(
                    "[...document.querySelectorAll('#spans td.num')].map(cell => cell.scrollWidth - cell.clientWidth)"
                )
                assert max(texts) <= 0, "times are not cut"
        finally:
            await page.size(1280, 900)


async def test_a_refused_pair_shows_the_facts_that_differ(page: Page) -> None:
    async with a_fleet() as (url, _):
        await page.go(url + "/ui")
        await page.until(f"{CELLS}.length === 3 && {CELLS}[1].dataset.fit === 'no'")
        await page.js(f"{CELLS}[1].click()")
        await page.until("document.querySelector('.facts') !== null")
        row = await page.js("[...document.querySelectorAll('.facts tbody tr > *')].map(cell => cell.textContent)")
        assert row == ["transfer mode", "push", "pull", "✕ must match", "start both with the same --transfer-mode"]
        assert not await page.js("document.querySelector('#detail pre') !== null"), "said once"
        assert page.complaints == []


async def test_the_last_minutes_are_small_charts(page: Page) -> None:
    async with a_fleet() as (url, _):
        await complete(url, "whole")
        await complete(url, "stream", stream=True)
        await page.go(url + "/ui")
        await page.until("document.getElementById('now-share').textContent === '99 %'")
        assert "p50" in await page.js("document.getElementById('now-first').textContent")
        assert await page.js("document.querySelectorAll('.charts path').length") == 4
        first = await page.js("[...document.querySelectorAll('#recent tr')].map(row => row.cells[5].textContent)")
        assert first[1] == "–", "an answer that is not streamed has no first byte of its own"
        assert first[0].endswith(" ms")


async def test_what_is_open_is_shown_while_it_is_open(page: Page) -> None:
    hold = asyncio.Event()
    async with a_fleet(hold) as (url, _):
        streaming = asyncio.create_task(complete(url, "open-one", stream=True))
        await page.go(url + "/ui")
        await page.until("document.querySelector('#open .link')?.textContent === 'open-one'")
        await page.until("document.querySelector('#open .tag').textContent === 'streaming'")
        hold.set()
        await streaming
        await page.until("!document.getElementById('no-open').hidden")
        await page.js(
            "document.getElementById('filter').value = 'nothing like it'; filter.dispatchEvent(new Event('input'))"
        )
        assert await page.js("document.getElementById('no-recent').textContent") == "No request matches the filter."
        assert page.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_follows_the_systems_colours_and_is_readable_in_both(page: Page, scheme: str) -> None:
    await page.prefer(scheme)
    async with a_fleet() as (url, _):
        await page.go(url + "/ui")
        await page.js("localStorage.clear()")
        await page.go("about:blank")
        await page.go(url + "/ui")
        await page.until(f"{CELLS}.length === 3 && document.querySelector('.cell').dataset.fit === 'yes'")
        assert await page.js("document.documentElement.dataset.theme") == scheme
        for selector in (
            "h2",
            ".hint",
            ".figures dt",
            "#health",
            ".cell[data-fit=no] .state",
            ".cell[data-fit=yes] .small",
        ):
            ink, paper = await page.js(
                f"(() => {{ let node = document.querySelector({selector!r}); const ink = getComputedStyle(node).color;"
                " const clear = 'rgba(0, 0, 0, 0)'; const of = one => getComputedStyle(one).backgroundColor;"
                " while (of(node) === clear && node.parentElement && !node.dataset.fit) node = node.parentElement;"
                " const paper = of(node) === clear ? getComputedStyle(document.documentElement)"
                ".getPropertyValue('--bad-bg') : of(node); return [ink, paper]; })()"
            )
            if paper.startswith("#"):
                paper = "rgb(" + ",".join(str(int(paper[at : at + 2], 16)) for at in (1, 3, 5)) + ")"
            assert contrast(ink, paper) >= 4.5, (selector, ink, paper)  # WCAG 2.2, 1.4.3
        other = "dark" if scheme == "light" else "light"
        for _ in range(3):
            await page.js("document.getElementById('theme').click()")
            if await page.js("document.documentElement.dataset.theme") == other:
                break
        assert await page.js("document.documentElement.dataset.theme") == other
        await page.go("about:blank")
        await page.go(url + "/ui")
        await page.until(f"document.documentElement.dataset.theme === '{other}'")  # it is remembered
        await page.js("localStorage.clear()")
        assert page.complaints == []


async def test_a_router_with_keys_asks_for_one(page: Page, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-a-client\n")
    decode = a_decode("d0")
    async with AsyncExitStack() as stack:
        await decode.start()
        stack.push_async_callback(decode.stop)
        router = Router([], [decode.url], FAST, files=RouterFiles(api_keys=str(keys)))
        url = await stack.enter_async_context(a_router(router))
        await page.go(url + "/ui")
        await page.until("document.getElementById('key-dialog').open")
        assert await page.js("document.activeElement.id") == "key"
        assert await page.js("document.getElementById('key-refused').hidden")
        await page.type("a-wrong-key")
        await page.press("Enter")
        await page.until("!document.getElementById('key-refused').hidden")
        await page.type("a-key-of-a-client")  # it replaces the wrong one, which is selected
        await page.press("Enter")
        await page.until("document.querySelectorAll('.worker').length === 1")
        await page.until("document.getElementById('alarm').textContent.includes('decode only')")
        assert await page.js("document.getElementById('alarm').getAttribute('role')") == "alert"
        await page.js("sessionStorage.clear()")


@asynccontextmanager
async def a_router(router: Router) -> AsyncIterator[str]:
    """Yields the address of a router."""
    listener = Listener(router.app, "127.0.0.1", 0, shutdown_s=0.2)
    await listener.start()
    try:
        yield listener.url
    finally:
        await listener.stop()


async def test_a_large_fleet_is_still_one_matrix(page: Page) -> None:
    unreachable = [f"http://127.0.0.1:{port}" for port in range(1, 25)]
    async with a_router(Router(unreachable[:12], unreachable[12:], FAST)) as url:
        await page.go(url + "/ui")
        await page.until(f"{CELLS}.length === 144 && {CELLS}.every(cell => cell.dataset.fit === 'down')")
        assert await page.js("document.getElementById('matrix').getBoundingClientRect().width < innerWidth * 1.3")
        assert await page.js("document.getElementById('health').textContent") == "✕ unavailable"
        assert page.complaints == []
