"""Garbage for a side channel: what a port scanner, a wrong client, or an old peer would send."""

import contextlib
import random
import socket

import zmq

__all__ = ["throw_rubbish"]


def throw_rubbish(port: int, seed: int = 5) -> None:
    """Sends bytes that are not ZeroMQ, ZeroMQ messages that are not ours, and cut messages. Waits for no answer."""
    dice = random.Random(seed)
    for raw in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, dice.randbytes(4096)):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as one:
            one.sendall(raw)
    context = zmq.Context()
    messages: list[list[bytes]] = [
        [b""], [b"", b""], [dice.randbytes(100)], [b"", dice.randbytes(5000)], [b"\x93\x01\x02\x03"], [b"", b"\xc1"],
        [b"", b"get_meta_msg"], [b"\x80\x04N."], [b"a"] * 20, [b"", b"\x92\xacget_meta_msg\xcf" + b"\xff" * 8],
        [b"", b"\x93\xacget_meta_msg\xff\xff"], [b"", b"\x92\xacget_meta_msg\xa1x"],
    ]  # fmt: skip
    try:
        for kind in (zmq.DEALER, zmq.REQ):
            for message in messages:
                with context.socket(kind) as one:
                    one.setsockopt(zmq.LINGER, 200)
                    one.connect(f"tcp://127.0.0.1:{port}")
                    one.send_multipart(message)
                    one.poll(50)
    finally:
        context.destroy(linger=200)
