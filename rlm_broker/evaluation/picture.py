"""The scores of an evaluation as an SVG: a panel for each task, score over length, an interval at each point.

The picture needs no other file and no script. Its colours follow the reader's light or dark scheme.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from rlm_broker.evaluation.report import Cell, Report

WIDTH: Final = 380
HEIGHT: Final = 240
LEFT, RIGHT, TOP, BOTTOM = 44, 16, 40, 36
COLUMNS: Final = 3
HEADER: Final = 56
"""Height of the title and the legend, in pixels, as all lengths here."""
APART: Final = 9
"""Distance between the points of two arms at one length, so that their intervals do not hide each other."""
COLOURS: Final = (("#0b62bd", "#6cb2ff"), ("#b8400a", "#ff9d66"), ("#14783a", "#5fd38a"), ("#7a28c4", "#c99bff"))
"""Colour of each arm in light and in dark."""
SHAPES: Final = ("circle", "square", "diamond", "triangle")
_STYLE: Final = """
svg { color-scheme: light dark; font: 12px system-ui, sans-serif; }
.paper { fill: #ffffff; } text { fill: #1c2024; } .grid { stroke: #d9dde1; } .quiet { fill: #555d66; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #16191d; } text { fill: #e8eaed; } .grid { stroke: #3a4048; } .quiet { fill: #a9b1ba; }
}
"""


def svg(report: Report) -> str:
    """Return the picture of a report, as the text of an SVG file."""
    tasks = list(dict.fromkeys(cell.task for cell in report.cells))
    columns = max(1, min(COLUMNS, len(tasks)))
    width, height = columns * WIDTH, HEADER + HEIGHT * max(1, math.ceil(len(tasks) / columns))
    title = f"Score by length of the context: {report.about.get('model', '')}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img" aria-label={quoteattr(_clean(title))}>',
        f"<style>{_STYLE}{_arm_styles(len(report.arms))}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        _text(16, 22, title, more='font-weight="600" font-size="14"'),
        *_legend(report.arms),
    ]
    for place, task in enumerate(tasks):
        x, y = place % columns * WIDTH, HEADER + place // columns * HEIGHT
        cells = [cell for cell in report.cells if cell.task == task]
        parts += [f'<g transform="translate({x} {y})">', *_panel(task, cells, report.arms), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _arm_styles(arms: int) -> str:
    light, dark = [], []
    for place in range(arms):
        day, night = COLOURS[place % len(COLOURS)]
        light.append(f".arm{place} {{ fill: {day}; stroke: {day}; }}")
        dark.append(f".arm{place} {{ fill: {night}; stroke: {night}; }}")
    return f"{' '.join(light)}\n@media (prefers-color-scheme: dark) {{ {' '.join(dark)} }}\n"


def _legend(arms: Sequence[str]) -> Iterator[str]:
    x = 24.0
    for place, arm in enumerate(arms):
        yield _mark(place, x, 42)
        yield _text(x + 10, 46, arm)
        x += 40 + 7 * len(arm)
    yield _text(x, 46, "mean and 95 % interval", more='class="quiet"')


def _panel(task: str, cells: Sequence[Cell], arms: Sequence[str]) -> Iterator[str]:
    lengths = list(dict.fromkeys(cell.length for cell in cells))
    step = (WIDTH - LEFT - RIGHT) / len(lengths)
    across = {length: LEFT + step * (place + 0.5) for place, length in enumerate(lengths)}
    yield _text(LEFT, TOP - 16, task, more='font-weight="600"')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _height(share)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        yield _text(LEFT - 8, y + 4, f"{share:g}", "end", 'class="quiet"')
    for length, x in across.items():
        yield _text(x, HEIGHT - BOTTOM + 20, length, "middle", 'class="quiet"')
    for place, arm in enumerate(arms):
        aside = (place - (len(arms) - 1) / 2) * APART
        points = [(across[cell.length] + aside, cell) for cell in cells if cell.arm == arm]
        yield from _line(place, points)


def _line(place: int, points: Sequence[tuple[float, Cell]]) -> Iterator[str]:
    path = " ".join(f"{x:.1f},{_height(cell.score.mean):.1f}" for x, cell in points)
    yield f'<polyline class="arm{place}" style="fill: none" stroke-width="1.5" points="{path}"/>'
    for x, cell in points:
        score = cell.score
        told = f"{cell.arm}, {cell.task}, {cell.length}: {score.mean:.2f} ({score.low:.2f} to {score.high:.2f})"
        low, high = _height(score.low), _height(score.high)
        yield f"<g><title>{escape(_clean(told))}</title>"
        yield f'<line class="arm{place}" x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}"/>'
        for y in (low, high):
            yield f'<line class="arm{place}" x1="{x - 3:.1f}" y1="{y:.1f}" x2="{x + 3:.1f}" y2="{y:.1f}"/>'
        yield f"{_mark(place, x, _height(score.mean))}</g>"


def _mark(place: int, x: float, y: float) -> str:
    """Return the sign of an arm: arms differ by shape as well as by colour."""
    shape, named = SHAPES[place % len(SHAPES)], f'class="arm{place}"'
    if shape == "circle":
        return f'<circle {named} cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    corners = {
        "square": ((-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)),
        "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
        "triangle": ((0, -5), (4.5, 4), (-4.5, 4)),
    }[shape]
    return f'<polygon {named} points="{" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)}"/>'


def _height(score: float) -> float:
    return TOP + (1 - score) * (HEIGHT - TOP - BOTTOM)


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(_clean(text))}</text>'


def _clean(text: str) -> str:
    """Return a text without characters that XML forbids, cut to what a panel has room for."""
    return "".join(each if each.isprintable() else " " for each in text)[:80]
