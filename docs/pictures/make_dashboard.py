"""Makes the README's picture of the dashboard: a scripted fleet, a real router, and a real Chromium.

Run by `make pictures`, or from the repository's root as `python -m docs.pictures.make_dashboard`. With `--all FOLDER`
it also writes the whole page, with a time line, in both themes and two widths, for a look at its design.
"""

import argparse
import asyncio
import math
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.router.app import Router
from kvferry.web.stages import HandoffTotals
from tests.harness.browser import Page, a_page, chromium_path
from tests.harness.handshake_examples import decode_facts, facts
from tests.harness.scripted_worker import FAST, fleet
from tests.harness.traced_worker import TracedWorker, a_decode, a_prefill

PICTURE = Path(__file__).parent / "dashboard.png"
MAX_BYTES = 200_000
WIDTH, HEIGHT = 1100, 990


def workers(hold: asyncio.Event) -> list[TracedWorker]:
    """Three prefill workers, of which one has another KV dtype and one is down, and two decode workers."""
    totals = {"prefill-0": HandoffTotals(812, 0, 96_000_000_000, 21.0)}
    stages = (("queue", 0.006), ("prefill", 0.048))
    decode = (("handshake", 0.004), ("transfer", 0.014), ("decode", 0.11))
    found = [
        a_prefill("prefill-0", *stages),
        a_prefill("prefill-1", *stages),
        a_prefill("prefill-2", port=1),
        a_decode("decode-0", *decode, hold=hold, totals=totals),
        a_decode("decode-1", *decode, hold=hold, totals=totals),
    ]
    rooms = {"prefill-0": (1310, 410), "prefill-1": (1804, 120), "decode-0": (622, 1010), "decode-1": (118, 64)}
    for worker in found:
        assert worker.info is not None, "it was just made"
        free, cached = rooms.get(worker.name, (0, 0))
        own = facts() if worker.role == "prefill" else decode_facts()
        if worker.name == "prefill-1":
            own = facts(kv_dtype="fp8_e4m3")
        worker.info |= {
            "version": "0.1.0",
            "model": "Llama-3.1-8B",
            "limits": {"max_model_len": 8192, "block_tokens": 16, "blocks": 2048},
            "room": {"free_blocks": free, "waiting": 0},
            "cache": {"version": 1, "blocks": cached},
            "facts": own.to_json(),
        }
    return found


def fill(router: Router, rng: random.Random) -> None:
    """Gives the router a past: three minutes of traffic, and the counters of its pairs."""
    now_s = time.monotonic()
    for age_s in range(172, -6, -1):
        for _ in range(int(9 + 4 * math.sin(age_s / 17) + rng.random() * 3)):
            first_s = 0.07 + rng.expovariate(1 / 0.02) + (0.2 if rng.random() < 0.02 else 0.0)
            prompt = rng.randint(200, 3000)
            handed_over = int(prompt * min(1.0, 0.72 + 0.15 * math.sin(age_s / 31) + 0.05 * rng.random()))
            router.timelines.history.add(
                now_s - age_s, first_byte_s=first_s, handed_over=handed_over, prompt_tokens=prompt
            )
    for decode, landed in zip(router.fleet.decode, (812, 547), strict=True):
        pair = router.fleet.pairs.of(router.fleet.prefill[0], decode)
        pair.landed, pair.handed_over_tokens = landed, landed * 1207
    router.timelines.num_ended = 1352


async def complete(session: aiohttp.ClientSession, url: str, request_id: str, **more: Any) -> None:
    """Sends one request."""
    body = {"prompt": "a prompt that is never shown", "max_tokens": 4, **more}
    async with session.post(url + "/v1/completions", json=body, headers={"X-Request-Id": request_id}) as answer:
        await answer.read()


@asynccontextmanager
async def a_busy_router() -> AsyncIterator[str]:
    """A router that has answered requests and has some open; its address."""
    hold, rng = asyncio.Event(), random.Random(7)
    hold.set()
    async with fleet(*workers(hold), settings=FAST) as (url, router), aiohttp.ClientSession() as session:
        for number in range(9):
            request_id = f"chat-{rng.getrandbits(40):010x}"
            more: dict[str, Any] = {"stream": True}
            if number == 4:
                more = {"prompt": ["two", "prompts"]}
            if number == 6:
                more = {"stream": False}
            await complete(session, url, request_id, **more)
        fill(router, rng)
        hold.clear()
        opened = [
            asyncio.create_task(complete(session, url, f"chat-{rng.getrandbits(40):010x}", stream=True))
            for _ in range(2)
        ]
        try:
            yield url
        finally:
            hold.set()
            await asyncio.gather(*opened)


async def open_line(page: Page) -> None:
    """Opens the time line of a streamed request."""
    await page.js("document.querySelector('#recent .link').click()")
    await page.until("document.querySelectorAll('#spans tr').length > 5")


async def show_refusal(page: Page) -> None:
    """Opens the details of a refused pair."""
    await page.js("document.querySelector('.cell[data-fit=no]').click()")
    await page.until("document.querySelector('.facts') !== null")


async def make(chromium: str, folder: Path | None) -> None:
    """Writes the picture; with a folder, also all variants into it."""
    with tempfile.TemporaryDirectory() as scratch:
        async with a_busy_router() as url, a_page(chromium, Path(scratch)) as page:
            await page.prefer("light")
            await page.size(WIDTH, HEIGHT)
            await page.go(url + "/ui")
            await page.until("document.querySelectorAll('#open tr').length === 2")
            await page.until("document.querySelector('.cell[data-fit=yes] .main').textContent.includes('GB/s')")
            await show_refusal(page)
            await page.picture(PICTURE, clip=(WIDTH, HEIGHT))
            if folder is None:
                return
            folder.mkdir(parents=True, exist_ok=True)
            await open_line(page)
            for scheme in ("light", "dark"):
                await page.prefer(scheme)
                for width in (1400, 420):
                    await page.size(width, 1000)
                    await page.js("scrollTo(0, 0); new Promise(done => setTimeout(done, 600))")  # transitions end
                    await page.picture(folder / f"{scheme}-{width}.png")


def main() -> None:
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", metavar="FOLDER", type=Path, help="also write all variants to this folder")
    args = parser.parse_args()
    chromium = chromium_path()
    if chromium is None:
        raise SystemExit("there is no Chromium here: apt-get install chromium, or set CHROMIUM to one")
    asyncio.run(make(chromium, args.all))
    size = PICTURE.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{PICTURE} has {size} bytes and may have {MAX_BYTES}: make it smaller")
    print(f"wrote {PICTURE}, {size} bytes")


if __name__ == "__main__":
    main()
