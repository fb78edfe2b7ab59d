"""Curves as an SVG, both axes logarithmic: a straight line is a power, a bend is news."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from scripts.bench.row import Curve, number

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 34, 44
COLUMNS = 2
COLOURS = ("#0b66c3", "#c2410c", "#15803d", "#7e22ce", "#525252")
LEGEND_LINE = 16


def svg(curves: Sequence[Curve]) -> str:
    """All curves, two panels a row."""
    legend = LEGEND_LINE * max((len(curve.lines) for curve in curves), default=0)
    panel = HEIGHT + legend
    width, height = WIDTH * min(COLUMNS, len(curves)), panel * math.ceil(len(curves) / COLUMNS)
    panels = "\n".join(
        f'<g transform="translate({place % COLUMNS * WIDTH} {place // COLUMNS * panel})">\n{_panel(curve)}\n</g>'
        for place, curve in enumerate(curves)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        f"{panels}\n</svg>\n"
    )


def _panel(curve: Curve) -> str:
    points = [point for line in curve.lines.values() for point in line if min(point) > 0]
    across = _Axis([x for x, _ in points], LEFT, WIDTH - RIGHT)
    up = _Axis([y for _, y in points], HEIGHT - BOTTOM, TOP)
    parts = [_text(LEFT, 20, f"{curve.what}, {curve.unit}", "start", 'font-weight="bold"')]
    for value in across.decades:
        x = across.at(value)
        parts += [_line(x, TOP, x, HEIGHT - BOTTOM), _text(x, HEIGHT - BOTTOM + 16, f"{value:,g}", "middle")]
    for value in up.decades:
        y = up.at(value)
        parts += [_line(LEFT, y, WIDTH - RIGHT, y), _text(LEFT - 6, y + 4, f"{value:,g}", "end")]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 34, curve.along, "middle"))
    for row, (name, line) in enumerate(curve.lines.items()):
        parts += _drawn(name, line, curve.unit, (across, up), row)
    return "\n".join(parts)


def _drawn(
    name: str, line: Sequence[tuple[float, float]], unit: str, axes: tuple["_Axis", "_Axis"], row: int
) -> list[str]:
    colour = COLOURS[row % len(COLOURS)]
    places = [(axes[0].at(x), axes[1].at(y)) for x, y in line if min(x, y) > 0]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    values = f"{number(line[0][1], '').strip()} … {number(line[-1][1], unit)}" if line else "nothing measured"
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places),
        _text(LEFT, HEIGHT + 4 + row * LEGEND_LINE, f"{name}: {values}", "start", f'fill="{colour}"'),
    ]


class _Axis:
    """From values to places, whole decades wide."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self._low = math.floor(math.log10(min(values, default=1)) + 1e-9)
        self._high = max(self._low + 1, math.ceil(math.log10(max(values, default=1)) - 1e-9))
        self._start, self._end = start, end

    @property
    def decades(self) -> list[float]:
        """Return the values of the grid's lines."""
        return [10.0**power for power in range(self._low, self._high + 1)]

    def at(self, value: float) -> float:
        """Return the place of a value."""
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
