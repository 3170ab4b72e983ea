"""The scheduler half: for which tokens a hand-off is (R51)."""

from dataclasses import replace

from kvferry.connector.peers import PeerStatus, PeerView
from kvferry.connector.scheduler import HandoffScheduler
from kvferry.handoff.orders import StepReport
from kvferry.ids import Incarnation
from kvferry.settings import OlderPeers
from kvferry.wire.first_token import FirstToken
from kvferry.wire.versions import BINDING
from tests.harness.scripted_half import TABLES, Board, Request, decode_request, landed, make, started


def carried(half: HandoffScheduler, request: Request) -> FirstToken | None:
    half.on_new_request(request)
    return half.carried_first_token(request)


def params_for(request: Request, **changes: object) -> Request:
    prompt = request.prompt
    stated = {"remote_prompt_tokens": prompt.num_tokens, "remote_prompt_digest": prompt.digest.hex(), **changes}
    return decode_request(first_token=9, **stated)


def test_a_carried_first_token_is_for_the_prompt_that_the_parameters_name() -> None:
    assert carried(make(), params_for(Request())) == FirstToken(token=9)
    assert carried(make(), params_for(Request(num_prompt_tokens=31))) is None
    assert carried(make(), params_for(Request(tokens=tuple(range(500, 600))))) is None
    assert carried(make(), params_for(Request(salt="tenant"))) is None


def test_a_first_token_of_an_older_release_is_counted_or_refused() -> None:
    assert carried(make(), decode_request(first_token=9)) == FirstToken(token=9)
    assert carried(make(), decode_request(first_token=9, remote_num_tokens=33)) is None
    assert carried(make(older_peers=OlderPeers.REFUSE), decode_request(first_token=9)) is None


def test_parameters_that_name_the_prompt_spare_the_links() -> None:
    long = Request(num_prompt_tokens=100)
    for request, links in ((params_for(long), False), (decode_request(), True)):
        half = make()
        request.num_prompt_tokens = 100
        half.on_new_request(request)
        half.match(request, 0)
        half.after_alloc(request, TABLES, 0)
        (fetch,) = half.build_orders().fetch
        assert fetch.prompt is not None
        assert bool(fetch.prompt.links) is links
        assert fetch.expected_tokens == 100


def test_an_older_peer_is_refused_by_setting_and_its_grant_is_given_up() -> None:
    old = Board(PeerView(PeerStatus.ACCEPTED, incarnation=Incarnation("first-start"), protocol=BINDING - 1))
    half = make(old, older_peers=OlderPeers.REFUSE)
    request = decode_request()
    half.on_new_request(request)
    match = half.match(request, 0)
    assert match.num_tokens == 0
    assert "'p0' speaks protocol version 3" in match.reason
    assert "--older-peers count" in match.reason
    assert half.build_orders().cancel  # prefill need not wait for its lease
    counted = make(old)
    counted.on_new_request(request)
    assert counted.match(request, 0).num_tokens == 32


def test_what_one_rank_says_of_the_prompt_holds_for_all() -> None:
    half = make(tp_size=2)
    request = decode_request()
    started(half, request)
    reports = [StepReport(landed=(landed(20),)), StepReport(landed=(replace(landed(20), difference="differs"),))]
    (joined,) = half.update(reports).landed
    assert (joined.arrived.stop, joined.difference) == (20, "differs")
