"""Which prompts are turns of one conversation, and what of them the worker of the earlier turn has in its cache."""

import msgspec
import pytest

from kvferry.router.fleet.prefixes import Prefixes, Prompt
from kvferry.router.fleet.sessions import Sessions, cuts_of
from kvferry.router.fleet.worker import Worker
from kvferry.settings import Role
from kvferry.web.records import Limits, WorkerInfo

SYSTEM = {"role": "system", "content": "Be brief. " * 60}


def a_worker(name: str = "d0", role: Role = Role.DECODE, blocks: int = 100) -> Worker:
    worker = Worker(f"http://{name}", role)
    worker.info = WorkerInfo(engine=name, incarnation="i1", role=role, limits=Limits(block_tokens=16, blocks=blocks))
    return worker


def chat(*contents: str, space: str = "") -> bytes:
    roles = ("user", "assistant")
    messages = [SYSTEM] + [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return msgspec.json.encode(messages).replace(b"},{", b"}," + space.encode() + b"{")


def asked(prefixes: Prefixes, raw: bytes) -> Prompt:
    return prefixes.prompt(raw, len(raw), None, with_pieces=False)


def serve(prefixes: Prefixes, raw: bytes, worker: Worker, num_prompt_tokens: int, num_answer_tokens: int) -> None:
    prompt = asked(prefixes, raw)
    prompt.counted(num_prompt_tokens)
    prefixes.served(prompt, worker, num_answer_tokens)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (chat("Hi"), chat("Hi", "Hello!", "Why?")),
        (chat("Hi", space=" "), chat("Hi", "Hello!", "Why?", space=" ")),
        (chat("Hi"), chat("Hi")),
        (b'[{"role":"user","content":"Hi"}]', b'[{"role":"user","content":"Hi"},{"role":"assistant","content":"yes"}]'),
        (b'"' + b"word " * 100 + b'"', b'"' + b"word " * 100 + b' and more"'),
        (str(list(range(300))).encode(), str(list(range(400))).encode()),
    ],
)
def test_a_prompt_that_goes_on_is_a_later_turn(first: bytes, second: bytes) -> None:
    prefixes, worker = Prefixes(), a_worker()
    serve(prefixes, first, worker, 100, 50)
    assert asked(prefixes, second).served_before(worker)
    assert not asked(prefixes, second).served_before(a_worker("d1"))


@pytest.mark.parametrize("other", [chat("Who?"), chat("Hi there"), chat("Who?", "I", "Hi"), b'"Hi"'])
def test_a_prompt_with_the_same_system_message_is_another_conversation(other: bytes) -> None:
    prefixes, worker = Prefixes(), a_worker()
    serve(prefixes, chat("Hi"), worker, 100, 50)
    assert not asked(prefixes, other).served_before(worker)


def test_the_latest_turn_counts() -> None:
    prefixes, first, second = Prefixes(), a_worker("d0"), a_worker("d1")
    serve(prefixes, chat("Hi"), first, 100, 50)
    serve(prefixes, chat("Hi", "Hello!", "Why?"), second, 120, 50)
    assert asked(prefixes, chat("Hi", "Hello!", "Why?", "So", "What?")).served_before(second)


def test_a_conversation_has_a_worker_for_each_role() -> None:
    prefixes, prefill, decode = Prefixes(), a_worker("p0", Role.PREFILL), a_worker("d0")
    serve(prefixes, chat("Hi"), prefill, 100, 0)
    serve(prefixes, chat("Hi"), decode, 100, 50)
    later = asked(prefixes, chat("Hi", "Hello!", "Why?"))
    assert later.served_before(prefill)
    assert later.served_before(decode)
    assert later.num_cached(prefill) == 100


def test_the_answer_of_the_earlier_turn_is_in_decodes_cache() -> None:
    """The prompt of 434 tokens lacks what the user has added, and what the template puts around it."""
    prefixes, worker, answer = Prefixes(), a_worker(), "x" * 4 * 266
    serve(prefixes, chat("Hi"), worker, 150, 266)
    later = asked(prefixes, chat("Hi", answer, "Why?"))
    assert later.num_cached(worker) == 416
    assert 416 < later.num_tokens < 450
    assert later.num_cached(a_worker("d1")) == 0


def test_an_answer_that_the_next_prompt_leaves_out_does_not_count() -> None:
    prefixes, worker = Prefixes(), a_worker()
    serve(prefixes, chat("Hi"), worker, 150, 5000)
    later = asked(prefixes, chat("Hi", "short", "Why?"))
    assert 150 < later.num_cached(worker) == later.num_tokens < 200


def test_a_restart_forgets_what_was_cached() -> None:
    prefixes, worker = Prefixes(), a_worker()
    serve(prefixes, chat("Hi"), worker, 100, 50)
    assert worker.info is not None
    worker.info = msgspec.structs.replace(worker.info, incarnation="i2")
    assert asked(prefixes, chat("Hi", "Hello!", "Why?")).num_cached(worker) == 0


def test_what_is_older_than_half_of_the_cache_does_not_count() -> None:
    prefixes, worker = Prefixes(), a_worker(blocks=100)  # of 16 tokens
    serve(prefixes, chat("Hi"), worker, 100, 50)
    later = chat("Hi", "Hello!", "Why?")
    serve(prefixes, chat("another"), worker, 700, 100)
    assert asked(prefixes, later).num_cached(worker) > 0
    serve(prefixes, chat("a third"), worker, 1, 0)
    assert asked(prefixes, later).num_cached(worker) == 0
    assert asked(prefixes, later).served_before(worker)


def test_memory_is_bounded() -> None:
    sessions, worker = Sessions(max_turns=3), a_worker()
    for number in range(10):
        sessions.note((b"%d" % number,), 10, worker, 1, 1)
    assert [bool(sessions.find((b"%d" % number,))) for number in range(10)] == [False] * 7 + [True] * 3


def test_a_prompt_that_was_not_read_to_its_end_is_cut_after_its_last_whole_message() -> None:
    raw = chat("Hi", "Hello!", "Why?")
    assert cuts_of(raw[:-20], whole=False) == cuts_of(raw, whole=True)[:-1]
