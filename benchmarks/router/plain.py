"""The router that `benchmarks.router` compares with: prefill, then decode, bytes passed on, in plain aiohttp.

It checks nothing, counts nothing, retries nothing and knows no pairs: what remains is the cost of aiohttp.
"""

import argparse
import json

import aiohttp
from aiohttp import web

from kvferry.cli.support.parent_death import die_with_supervisor
from kvferry.web.listen import announce


async def handle(request: web.Request) -> web.StreamResponse:
    """Asks prefill, then decode, and passes on decode's answer."""
    session: aiohttp.ClientSession = request.app[SESSION]
    prefill, decode = request.app[WORKERS]
    body = json.loads(await request.read())
    ask = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    async with session.post(prefill + request.path, json=ask) as answer:
        body["kv_transfer_params"] = (await answer.json())["kv_transfer_params"]
    async with session.post(decode + request.path, json=body) as answer:
        if not body.get("stream"):
            return web.Response(body=await answer.read(), content_type=answer.content_type)
        response = web.StreamResponse(headers={"Content-Type": answer.content_type})
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


SESSION = web.AppKey("session", aiohttp.ClientSession)
WORKERS = web.AppKey("workers", tuple[str, str])


def main() -> None:
    """Serves until it is killed, or until the benchmark ends."""
    die_with_supervisor()
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("prefill", "decode", "port", "ready-file"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    app = web.Application()
    app[WORKERS] = (args.prefill, args.decode)

    async def start(app: web.Application) -> None:
        app[SESSION] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def started(_: web.Application) -> None:
        announce(args.ready_file)

    async def stop(app: web.Application) -> None:
        await app[SESSION].close()

    app.on_startup.extend([start, started])
    app.on_cleanup.append(stop)
    app.router.add_post("/v1/{rest:.*}", handle)
    web.run_app(app, host="127.0.0.1", port=int(args.port), access_log=None, print=None)


if __name__ == "__main__":
    main()
