"""Layouts of both sides, all ranks, both directions. R18, R19, R23."""

from dataclasses import replace

import msgspec
import pytest

from kvferry.errors import IncompatiblePeer, MalformedMessage
from kvferry.handshake.fit import layouts_of, make_fit
from kvferry.handshake.handshaker import Handshaker
from kvferry.layout.builders import LayoutBuilder, head_range
from kvferry.layout.description import CacheLayout, Rank
from kvferry.settings import Role
from kvferry.wire.hello import Hello
from kvferry.wire.layout_codec import encode_layout
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
        make_fit(fewer, Role.BOTH)(both)  # but not if it may be the other way round


def test_ranks_out_of_order_are_malformed() -> None:  # R20
    p = engine("p", Role.PREFILL, 2)
    swapped = msgspec.structs.replace(p.hello, ranks=p.hello.ranks[::-1])
    with pytest.raises(MalformedMessage, match="must be in the order of their index"):
        layouts_of(swapped)


def test_handshakers_with_real_layouts() -> None:
    p, d = Handshaker(engine("p", Role.PREFILL, 2)), Handshaker(engine("d", Role.DECODE, 4))
    d.want(p.local.engine, None, "127.0.0.1", 1, 0.0)
    for asked in d.take_asks():
        d.replied(asked.token, p.answer(asked.body, "x", 0.0), 0.0)
    assert [peer.engine for peer in d.take_accepted()] == ["p"]
    assert [peer.engine for peer in p.take_accepted()] == ["d"]


def windowed(*, hybrid: bool, declared: bool = False) -> CacheLayout:
    """Returns one layer with a window of 8: in a window group, or in one with every block (which may declare it)."""
    builder = LayoutBuilder(Rank(0))
    group = builder.window(4, 8) if hybrid else builder.full(4, window_tokens=8 if declared else None)
    builder.attention("layers.0.attn", group, heads=head_range(2, 0, 1), head_dim=2, element_bytes=2, encoding="bf16",
                      num_blocks=8)  # fmt: skip
    return builder.build()


def test_a_window_on_prefill_where_decode_keeps_every_token_is_refused_on_both_sides() -> None:  # R1, R23
    p, d = engine("p", Role.PREFILL), engine("d", Role.DECODE)

    def says(layout: CacheLayout, hello: Hello) -> Hello:
        rank = msgspec.structs.replace(hello.ranks[0], layout=encode_layout(layout))
        return msgspec.structs.replace(hello, ranks=(rank,))

    window, full = windowed(hybrid=True), windowed(hybrid=False)
    reason = r"layer 'layers.0.attn' part 'k': decode keeps every token of it, but prefill keeps only the last 8; use"
    with pytest.raises(IncompatiblePeer, match=reason):
        make_fit((window,), Role.PREFILL)(says(full, d.hello))
    with pytest.raises(IncompatiblePeer, match=reason):
        make_fit((full,), Role.DECODE)(says(window, p.hello))
    make_fit((window,), Role.PREFILL)(says(windowed(hybrid=False, declared=True), d.hello))  # it needs the window only
    make_fit((full,), Role.PREFILL)(says(window, d.hello))  # more than is needed does no harm
    make_fit((window,), Role.PREFILL)(says(window, d.hello))
