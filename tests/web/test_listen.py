"""A listener releases its port if its application cannot start; a ready-file exists only while its process runs."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from kvferry.web.listen import Listener, check_ready_file


async def test_an_application_that_does_not_start_leaves_no_socket() -> None:
    async def fail(_: web.Application) -> None:
        raise RuntimeError("no worker answers")

    app = web.Application()
    app.on_startup.append(fail)
    listener = Listener(app, "127.0.0.1", 0)
    listener.bind()
    with pytest.raises(RuntimeError, match="no worker answers"):
        await listener.start()
    with socket.socket() as again:
        again.bind(("127.0.0.1", listener.port))


def test_the_ready_file_of_an_earlier_run_is_deleted_before_the_model_is_loaded(tmp_path: Path) -> None:
    stale = tmp_path / "ready.json"
    stale.write_text('{"pid": 1, "url": "http://127.0.0.1:1"}')
    check_ready_file(str(stale))
    assert not stale.exists()


@pytest.mark.parametrize("replaced", [False, True])
def test_the_ready_file_is_deleted_when_its_process_ends(tmp_path: Path, replaced: bool) -> None:
    ready = tmp_path / "ready.json"
    code = "import sys; from kvferry.web.listen import announce; announce(sys.argv[1], url='u')"
    if replaced:
        code += "; open(sys.argv[1], 'w').write('another')"
    subprocess.run([sys.executable, "-c", code, str(ready)], check=True)
    assert ready.exists() is replaced
