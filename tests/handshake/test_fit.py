"""Layouts of both sides, all ranks, both directions. R18, R19, R23."""

from dataclasses import replace

import msgspec
import pytest

from kvferry.errors import IncompatiblePeer, MalformedMessage
from kvferry.handshake.desk import Desk
from kvferry.handshake.fit import layouts_of, make_fit
from kvferry.settings import Role
from tests.attacks.fuzz import engine


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4)])
def test_unequal_tensor_parallelism_fits(prefill: int, decode: int) -> None:  # R23
    p, d = engine("p", Role.PREFILL, prefill), engine("d", Role.DECODE, decode)
    p.fit(d.hello)
    d.fit(p.hello)


def test_a_layer_that_prefill_lacks_is_refused_on_both_sides() -> None:  # R19
    p, d = engine("p", Role.PREFILL), engine("d", Role.DECODE)
    layouts = layouts_of(p.hello)
    fewer = tuple(replace(one, tensors=tuple(t for t in one.tensors if t.layer != "layers.1.attn")) for one in layouts)
    with pytest.raises(IncompatiblePeer, match=r"layers\.1\.attn"):
        make_fit(fewer, Role.PREFILL)(d.hello)
    make_fit(layouts, Role.PREFILL)(d.hello)


def test_only_the_directions_that_the_roles_allow_are_paired() -> None:
    p, d = engine("p", Role.PREFILL), engine("d", Role.DECODE)
    fewer = tuple(replace(one, tensors=one.tensors[:2]) for one in layouts_of(d.hello))
    make_fit(fewer, Role.DECODE)(p.hello)  # prefill may have more layers than decode needs
    both = msgspec.structs.replace(p.hello, role=Role.BOTH)
    make_fit(fewer, Role.DECODE)(both)
    with pytest.raises(IncompatiblePeer):
        make_fit(fewer, Role.BOTH)(both)  # but not where it may be the other way round


def test_ranks_out_of_order_are_malformed() -> None:  # R20
    p = engine("p", Role.PREFILL, 2)
    swapped = msgspec.structs.replace(p.hello, ranks=p.hello.ranks[::-1])
    with pytest.raises(MalformedMessage, match="its ranks are not in order"):
        layouts_of(swapped)


def test_desks_with_real_layouts() -> None:
    p, d = Desk(engine("p", Role.PREFILL, 2)), Desk(engine("d", Role.DECODE, 4))
    d.want(p.local.engine, None, "127.0.0.1", 1, 0.0)
    for asked in d.take_asks():
        d.replied(asked.token, p.answer(asked.body, "x", 0.0), 0.0)
    assert [peer.engine for peer in d.take_accepted()] == ["p"]
    assert [peer.engine for peer in p.take_accepted()] == ["d"]
