"""The picture of `kvferry plan`: ranks on both sides, their layers and heads, and a band for each edge.

A decode rank is a grid of layers (across) and first-axis elements (down, heads mostly); each field has the colour of
the prefill rank that it comes from. Bands are as wide as the bytes that they carry; dashed ones are staged.
"""

import math
from collections.abc import Sequence
from html import escape

from kvferry.cli.support.plan_text import Row
from kvferry.layout.description import CacheLayout, Tensor
from kvferry.layout.edge import Edge
from kvferry.layout.pairing import pair

__all__ = ["picture"]

WIDTH, GRID, LEFT, RIGHT, GAP, TOP = 980, 300, 40, 640, 26, 70
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#994455", "#004488", "#997700")
FONT = 'font-family="ui-sans-serif, system-ui, sans-serif"'


def picture(source: Sequence[CacheLayout], destination: Sequence[CacheLayout], rows: Sequence[Row], tokens: int) -> str:
    """An SVG document."""
    sources = sorted(source, key=lambda layout: layout.rank.index)
    targets = sorted(destination, key=lambda layout: layout.rank.index)
    layers = list(dict.fromkeys(t.layer for layout in (*sources, *targets) for t in layout.tensors))
    tall = max(3, min(12, max(_height(layout) for layout in (*sources, *targets))))
    unit = 11 * tall + 20
    height = TOP + max(len(sources), len(targets)) * (unit + GAP) + 30
    colour = {layout.rank.index: COLOURS[i % len(COLOURS)] for i, layout in enumerate(sources)}
    places: dict[tuple[str, int], float] = {}
    body: list[str] = []
    for x, side, group in ((LEFT, "prefill", sources), (RIGHT, "decode", targets)):
        step = (height - TOP - 30) / len(group)
        for number, layout in enumerate(group):
            y = TOP + number * step + (step - unit) / 2
            places[side, layout.rank.index] = y + 18 + 11 * tall / 2
            body.append(_rank(x, y, side, layout))
            edges = pair(sources, layout).edges if side == "decode" else ()
            body += _grid(x, y + 18, 11 * tall, layout, layers, edges, colour)
    most = max((row.bytes for row in rows), default=1)
    bands = [_band(places, row, colour[row.source_rank], most) for row in rows]
    title = (
        f"{len(sources)} prefill and {len(targets)} decode ranks, {len(layers)} layers, one request of {tokens} "
        f"tokens, {_size(sum(row.bytes for row in rows))} over {len(rows)} edges"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
            f'viewBox="0 0 {WIDTH} {height:.0f}">',
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
            f'<text x="{LEFT}" y="28" font-size="16" {FONT} fill="#222222">{escape(title)}</text>',
            f'<text x="{LEFT}" y="48" font-size="12" {FONT} fill="#666666">layers across, heads down; the colour is '
            "the prefill rank that a field comes from; dashed bands are staged</text>",
            *bands,
            *body,
            "</svg>",
            "",
        ]
    )


def _height(layout: CacheLayout) -> int:
    return max(
        (tensor.axes[0].extent for tensor in layout.tensors if tensor.axes and tensor.axes[0].name == "head"), default=1
    )


def _rank(x: float, y: float, side: str, layout: CacheLayout) -> str:
    rank = layout.rank
    where = [f"tp {rank.tp_rank}/{rank.tp_size}", f"pp {rank.pp_rank}/{rank.pp_size}"]
    if rank.cp_size > 1:
        where.append(f"cp {rank.cp_rank}/{rank.cp_size}")
    return (
        f'<text x="{x}" y="{y + 12:.1f}" font-size="12" {FONT} fill="#222222">{side} rank {rank.index} '
        f'<tspan fill="#888888">{" ".join(where)}</tspan></text>'
    )


def _grid(
    x: float,
    y: float,
    tall: float,
    layout: CacheLayout,
    layers: Sequence[str],
    edges: Sequence[Edge],
    colour: dict[int, str],
) -> list[str]:
    """What a rank holds: a source in its own colour, a destination in those of its sources."""
    wide = GRID / len(layers)
    fields: dict[tuple[float, float, float, str], str] = {}

    def put(layer: str, extent: int, start: int, stop: int, fill: str) -> None:
        # One rectangle for k and v, and for other parts that are cut alike.
        key = (layers.index(layer) * wide, tall * start / extent, tall * (stop - start) / extent, fill)
        fields.setdefault(key, layer)

    by_head = {t.layer for t in layout.tensors if any(axis.name == "head" for axis in t.axes)}
    if not edges:
        for tensor in layout.tensors:
            number = _drawn(tensor, by_head)
            if number is not None:
                axis = tensor.axes[number] if tensor.axes else None
                cut = (axis.extent, axis.start, axis.stop) if axis else (1, 0, 1)
                put(tensor.layer, *cut, colour.get(layout.rank.index, "#dddddd"))
    for edge in edges:
        for piece in edge.slices:
            tensor = edge.destination.tensors[piece.destination_tensor]
            number = _drawn(tensor, by_head)
            if number is not None:
                cut = (tensor.axes[number].extent, *piece.ranges[number]) if tensor.axes else (1, 0, 1)
                put(piece.layer, *cut, colour[edge.source_rank])
    inset = min(0.75, wide / 8)
    return [
        f'<rect x="{x}" y="{y:.1f}" width="{GRID}" height="{tall:.1f}" fill="#f4f4f4" stroke="#cccccc"/>',
        *(
            f'<rect x="{x + across + inset:.2f}" y="{y + down:.2f}" width="{max(0.3, wide - 2 * inset):.2f}" '
            f'height="{max(0.5, deep - 0.75):.2f}" fill="{fill}"><title>{escape(layer)}</title></rect>'
            for (across, down, deep, fill), layer in fields.items()
        ),
    ]


def _drawn(tensor: Tensor, by_head: set[str]) -> int | None:
    """Which axis of a tensor is drawn: its heads, else its first one; None: the layer is drawn by another part."""
    number = next((i for i, axis in enumerate(tensor.axes) if axis.name == "head"), None)
    return number if number is not None else None if tensor.layer in by_head else 0


def _band(places: dict[tuple[str, int], float], row: Row, fill: str, most: int) -> str:
    begin, end = places["prefill", row.source_rank], places["decode", row.destination_rank]
    left, right = LEFT + GRID, RIGHT
    width = 1 + 13 * math.sqrt(row.bytes / most) if most else 1
    dash = ' stroke-dasharray="10 5"' if row.how == "staged" else ""
    text = (
        f"{row.source_rank} to {row.destination_rank}: {_size(row.bytes)}, {row.runs} runs, {row.how}, "
        f"{row.predicted_ms:.2f} ms"
    )
    middle = (left + right) / 2
    return (
        f'<path d="M {left} {begin:.1f} C {middle:.0f} {begin:.1f} {middle:.0f} {end:.1f} {right} {end:.1f}" '
        f'fill="none" stroke="{fill}" stroke-opacity="0.55" stroke-width="{width:.1f}"{dash}>'
        f"<title>{escape(text)}</title></path>"
    )


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
