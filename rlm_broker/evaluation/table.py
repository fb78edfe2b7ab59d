"""The report of an evaluation as text: one line for each cell, then the contrasts in sentences."""

from collections.abc import Iterator, Sequence

from rlm_broker.evaluation.intervals import NOISE_P
from rlm_broker.evaluation.report import ALL_TASKS, Cell, Contrast, Report

HEAD = ("task", "length", "arm", "score", "95 %", "items", "cost", "tokens", "seconds", "")
_LEFT = (0, 1, 2, 9)
"""Columns that are aligned to the left; the others hold numbers."""


def table(report: Report) -> str:
    """Return a report as lines of text. Cost, tokens and seconds are means of an item."""
    rows = [HEAD, *map(_row, report.cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(_cell(row, place, widths)).rstrip() for row in rows for place in (range(len(HEAD)),)]
    return "\n".join([*lines, "", *_totals(report), *_sentences(report)])


def dollars(cost: float | None) -> str:
    """Return a cost with as many digits as a small one needs; "?" if a price is not known."""
    if cost is None:
        return "?"
    return "$0" if cost == 0 else f"${cost:.2f}" if cost >= 1 else f"${cost:.3g}" if cost >= 1e-4 else f"${cost:.1g}"


def _cell(row: Sequence[str], places: range, widths: Sequence[int]) -> Iterator[str]:
    for place in places:
        yield row[place].ljust(widths[place]) if place in _LEFT else row[place].rjust(widths[place])


def _row(cell: Cell) -> tuple[str, ...]:
    ends = (("does not fit", cell.does_not_fit), ("failed", cell.failed), ("limited", cell.limited))
    return (
        cell.task,
        cell.length,
        cell.arm,
        f"{cell.score.mean:.2f}",
        f"{cell.score.low:.2f}-{cell.score.high:.2f}",
        str(cell.items),
        dollars(cell.cost_usd),
        f"{cell.input_tokens + cell.output_tokens:,.0f}",
        f"{cell.seconds:.1f}",
        ", ".join(f"{number} {what}" for what, number in ends if number),
    )


def _totals(report: Report) -> Iterator[str]:
    for arm in report.arms:
        usage = report.usage(arm)
        items = sum(each.arm == arm for each in report.outcomes)
        tokens = usage.total_input_tokens + usage.total_output_tokens
        cost = dollars(usage.total_cost if usage.total_calls else 0.0)
        yield f"{arm}: {_items(items)}, {usage.total_calls:,} calls, {tokens:,} tokens, {cost}"
    if report.unfinished:
        yield f"unfinished: {_items(report.unfinished)}"


def _sentences(report: Report) -> Iterator[str]:
    for contrast in report.contrasts:
        if contrast.task == ALL_TASKS:
            yield ""
            yield _sentence(contrast)
        else:
            yield f"  {contrast.task}: {_verdict(contrast)}"


def _sentence(contrast: Contrast) -> str:
    items = contrast.difference.items
    cost = "" if contrast.cost_ratio is None else f"; it costs {contrast.cost_ratio:.2g} times as much"
    return f"{contrast.arm} against {contrast.than}, the same {_items(items)}: {_verdict(contrast)}{cost}"


def _items(number: int) -> str:
    return "1 item" if number == 1 else f"{number:,} items"


def _verdict(contrast: Contrast) -> str:
    found = contrast.difference
    says = "beyond noise" if found.is_beyond_noise else "within noise"
    p_value = f"p = {found.p_value:.2g}" if found.p_value >= NOISE_P / 50 else f"p < {NOISE_P / 50:g}"
    return f"{found.mean:+.2f} ({p_value}), {says}"
