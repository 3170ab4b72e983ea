"""The picture of `kvferry plan`: ranks on both sides, their layers and heads, and a band for each edge.

A rank is a grid of layers (across) and of elements of the first axis, which are heads mostly (down). Each field of a
decode rank has the colour of the prefill rank that it comes from. Bands are as wide as the square root of the bytes
that they carry; a dashed band is staged. The picture follows the light or dark theme of the reader.
"""

import math
from collections.abc import Sequence
from html import escape

from kvferry.cli.support.plan_rows import Row
from kvferry.cli.support.terminal import plural, size
from kvferry.layout.description import CacheLayout, Tensor
from kvferry.layout.edge import Edge
from kvferry.layout.pairing import pair

__all__ = ["picture"]

WIDTH, GRID, LEFT, RIGHT, GAP, TOP, BOTTOM = 980, 290, 50, 640, 34, 84, 66
HEAD_PX = 13
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999", "#994455", "#3366bb", "#997700")
_STYLE = """<style>
  text { font-family: ui-sans-serif, system-ui, sans-serif; font-size: 12px; fill: #222222 }
  .title { font-size: 16px } .quiet { fill: #666666 } .axis { fill: #666666; font-size: 10px }
  .slow { fill: #b00020; font-weight: bold } .grid.slowest { stroke: #b00020; stroke-width: 2 }
  .page { fill: #ffffff } .grid { fill: #f4f4f4; stroke: #cccccc } .band { fill: none; stroke-opacity: 0.55 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e6e6 } .quiet, .axis { fill: #a5a5a5 } .slow { fill: #ff7b8a } .grid.slowest { stroke: #ff7b8a }
    .page { fill: #0d1117 } .grid { fill: #161b22; stroke: #3d444d } .band { stroke-opacity: 0.75 }
  }
</style>"""


def picture(source: Sequence[CacheLayout], destination: Sequence[CacheLayout], rows: Sequence[Row], tokens: int) -> str:
    """Returns an SVG document."""
    sources = sorted(source, key=lambda layout: layout.rank.index)
    targets = sorted(destination, key=lambda layout: layout.rank.index)
    layers = list(dict.fromkeys(t.layer for layout in (*sources, *targets) for t in layout.tensors))
    tall = HEAD_PX * max(2, min(12, max(_num_heads(layout) for layout in (*sources, *targets))))
    unit = tall + 32
    height = TOP + max(len(sources), len(targets)) * (unit + GAP) + BOTTOM
    colour = {layout.rank.index: COLOURS[i % len(COLOURS)] for i, layout in enumerate(sources)}
    times = {layout.rank.index: sum(r.predicted_ms for r in rows if r.destination_rank == layout.rank.index)
             for layout in targets}  # fmt: skip
    slowest = max(times, key=lambda rank: times[rank])
    differ = len({round(ms, 2) for ms in times.values()}) > 1
    places: dict[tuple[str, int], float] = {}
    body: list[str] = []
    for x, side, group in ((LEFT, "prefill", sources), (RIGHT, "decode", targets)):
        step = (height - TOP - BOTTOM) / len(group)
        for number, layout in enumerate(group):
            y = TOP + number * step + (step - unit) / 2
            places[side, layout.rank.index] = y + 18 + tall / 2
            edges = pair(sources, layout).edges if side == "decode" else ()
            slow = side == "decode" and layout.rank.index == slowest and differ
            body.append(_name(x, y, side, layout, times.get(layout.rank.index) if side == "decode" else None, slow))
            body += _grid(x, y + 18, tall, layout, layers, edges, colour, slow)
            body += _axes(x, y + 18, tall, layout, len(layers))
    most = max((row.bytes for row in rows), default=1)
    bands = [_band(places, row, colour[row.source_rank], most) for row in rows]
    title = _title(sources, targets, len(layers), rows, tokens)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'width="{WIDTH}" height="{height:.0f}">',
            _STYLE,
            f'<rect class="page" width="{WIDTH}" height="{height:.0f}"/>',
            f'<text class="title" x="{LEFT}" y="28">{escape(title)}</text>',
            f'<text class="quiet" x="{LEFT}" y="50">layers across, heads down; a field of a decode rank has the colour '
            "of the prefill rank that it comes from</text>",
            *bands,
            *body,
            *_legend(height, colour, rows),
            "</svg>",
            "",
        ]
    )


def _title(
    sources: Sequence[CacheLayout], targets: Sequence[CacheLayout], num_layers: int, rows: Sequence[Row], tokens: int
) -> str:
    return (
        f"{plural(len(sources), 'prefill rank')}, {plural(len(targets), 'decode rank')}, "
        f"{plural(num_layers, 'layer')}; one request of {plural(tokens, 'token')}: "
        f"{size(sum(row.bytes for row in rows))} over {plural(len(rows), 'edge')}"
    )


def _num_heads(layout: CacheLayout) -> int:
    return max(
        (tensor.axes[0].extent for tensor in layout.tensors if tensor.axes and tensor.axes[0].name == "head"), default=1
    )


def _name(x: float, y: float, side: str, layout: CacheLayout, ms: float | None, slow: bool) -> str:
    rank = layout.rank
    where = []
    if rank.tp_size > 1:
        where.append(f"tp {rank.tp_rank} of {rank.tp_size}")
    if rank.pp_size > 1:
        where.append(f"pp {rank.pp_rank} of {rank.pp_size}")
    if rank.cp_size > 1:
        where.append(f"cp {rank.cp_rank} of {rank.cp_size}")
    place = f"({', '.join(where)})" if where else ""
    time = ""
    if ms is not None:
        time = f'  <tspan class="{"slow" if slow else "quiet"}">{ms:.2f} ms{", slowest" if slow else ""}</tspan>'
    return f'<text x="{x}" y="{y + 12:.1f}">{side} rank {rank.index} <tspan class="quiet">{place}</tspan>{time}</text>'


def _axes(x: float, y: float, tall: float, layout: CacheLayout, num_layers: int) -> list[str]:
    """Numbers of the layers beneath a grid, and of the heads beside it."""
    step = max(1, -(-num_layers // 10))
    wide = GRID / num_layers
    lines = [
        f'<text class="axis" text-anchor="middle" x="{x + (number + 0.5) * wide:.1f}" y="{y + tall + 11:.1f}">'
        f"{number}</text>"
        for number in range(0, num_layers, step)
    ]
    heads = _num_heads(layout)
    each = max(1, -(-heads // 12))
    return lines + [
        f'<text class="axis" text-anchor="end" x="{x - 4}" y="{y + (number + 0.5) * tall / heads + 3.5:.1f}">'
        f"{number}</text>"
        for number in range(0, heads, each)
    ]


def _legend(height: float, colour: dict[int, str], rows: Sequence[Row]) -> list[str]:
    y, x = height - 38, float(LEFT)
    parts = []
    for rank, fill in list(colour.items())[:8]:
        parts.append(f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="11" height="11" fill="{fill}"/>')
        parts.append(f'<text class="quiet" x="{x + 16:.0f}" y="{y:.0f}">from prefill rank {rank}</text>')
        x += 132
        if x > WIDTH - 180 and rank != list(colour)[-1]:
            parts.append(f'<text class="quiet" x="{x:.0f}" y="{y:.0f}">...</text>')
            break
    y, x = height - 16, float(LEFT)
    for how, dash in (("direct", ""), ("staged", ' stroke-dasharray="10 5"')):
        found = [row for row in rows if row.how == how]
        if not found:
            continue
        parts.append(
            f'<line class="band" stroke="#888888" stroke-width="5" x1="{x:.0f}" x2="{x + 40:.0f}" y1="{y - 4:.0f}" '
            f'y2="{y - 4:.0f}"{dash}/>'
        )
        text = f"{how}: {plural(len(found), 'edge')}, {size(sum(row.bytes for row in found))}"
        if how == "direct":
            text += f" in {plural(sum(row.runs for row in found), 'run')}"
        parts.append(f'<text class="quiet" x="{x + 48:.0f}" y="{y:.0f}">{text}</text>')
        x += 330
    return parts


def _grid(
    x: float,
    y: float,
    tall: float,
    layout: CacheLayout,
    layers: Sequence[str],
    edges: Sequence[Edge],
    colour: dict[int, str],
    slow: bool,
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
    frame = "grid slowest" if slow else "grid"
    return [
        f'<rect class="{frame}" x="{x}" y="{y:.1f}" width="{GRID}" height="{tall:.1f}"/>',
        *(
            f'<rect x="{x + across + inset:.2f}" y="{y + down:.2f}" width="{max(0.3, wide - 2 * inset):.2f}" '
            f'height="{max(0.5, deep - 0.75):.2f}" fill="{fill}"><title>{escape(layer)}</title></rect>'
            for (across, down, deep, fill), layer in fields.items()
        ),
    ]


def _drawn(tensor: Tensor, by_head: set[str]) -> int | None:
    """Returns which axis is drawn: heads, else the first one; None if another part of the layer is drawn instead."""
    number = next((i for i, axis in enumerate(tensor.axes) if axis.name == "head"), None)
    return number if number is not None else None if tensor.layer in by_head else 0


def _band(places: dict[tuple[str, int], float], row: Row, fill: str, most: int) -> str:
    begin, end = places["prefill", row.source_rank], places["decode", row.destination_rank]
    left, right = LEFT + GRID, RIGHT - 16
    width = 1 + 13 * math.sqrt(row.bytes / most) if most else 1
    dash = ' stroke-dasharray="10 5"' if row.how == "staged" else ""
    text = (
        f"{row.source_rank} to {row.destination_rank}: {size(row.bytes)}, {plural(row.runs, 'run')}, {row.how}, "
        f"{row.predicted_ms:.2f} ms"
    )
    middle = (left + right) / 2
    return (
        f'<path class="band" d="M {left} {begin:.1f} C {middle:.0f} {begin:.1f} {middle:.0f} {end:.1f} {right} '
        f'{end:.1f}" stroke="{fill}" stroke-width="{width:.1f}"{dash}><title>{escape(text)}</title></path>'
    )
