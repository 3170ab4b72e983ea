"""Answers that are given later, on another thread, while the listener answers others. R39"""

import threading

from kvferry.sidechannel.late_answer import LateAnswer
from tests.harness.sidechannels import asking, collect, listening, settings


def test_an_answer_may_come_later_and_from_any_thread() -> None:
    waiting: list[LateAnswer] = []

    def answer(body: bytes, address: str) -> bytes | LateAnswer:
        if body == b"at once":
            return b"here"
        waiting.append(LateAnswer())
        return waiting[-1]

    with listening(answer) as server, asking() as client:
        for token in range(8):
            client.ask_nowait("127.0.0.1", server.port, b"later", token)
        client.ask_nowait("127.0.0.1", server.port, b"at once", 100)
        assert collect(client, 1) == {100: b"here"}, "the others do not hold it up"
        while len(waiting) < 8:
            client.wait(0.01)
        threads = [threading.Thread(target=one.give, args=(b"%d" % i,)) for i, one in enumerate(waiting)]
        for thread in threads:
            thread.start()
        assert sorted(str(body) for body in collect(client, 8).values()) == sorted(str(b"%d" % i) for i in range(8))
        for thread in threads:
            thread.join()
        assert server.stats().answered == 9


def test_only_the_first_answer_counts_and_it_may_come_before_the_listener_asks() -> None:
    late, sent = LateAnswer(), list[bytes]()
    late.give(b"first")
    late.give(b"second")
    late.then(sent.append)
    late.give(b"third")
    assert sent == [b"first"]


def test_an_answer_after_the_end_changes_nothing() -> None:
    waiting: list[LateAnswer] = []

    def answer(body: bytes, address: str) -> LateAnswer:
        waiting.append(LateAnswer())
        return waiting[-1]

    with listening(answer) as server, asking(settings(timeout_s=0.1)) as client:
        client.ask_nowait("127.0.0.1", server.port, b"x", 1)
        collect(client, 1)
    for one in waiting:
        one.give(b"too late")
