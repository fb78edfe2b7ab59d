"""Runs, blocks and usage in a few words for people."""

from typing import Any


def facts_of_run(run: Any) -> str:
    """Return what a `Completion` took and cost, and what ended it."""
    used = run.usage_summary.total
    parts = [
        run.root_model,
        counted(run.iterations, "turn"),
        f"{run.execution_time:.1f} s",
        spent(used),
        *([run.isolation.level] if run.isolation else []),
        *([f"ended at the limit {run.limit}"] if run.limit else []),
        *(["stopped"] if run.is_stopped else []),
    ]
    return ", ".join(parts)


def how_block_ended(block: Any) -> str:
    """Return a block's status, its time, and the limit that ended it."""
    limit = f" at the limit {block.limit}" if block.limit else ""
    return f"{block.status} after {block.execution_time:.2f} s{limit}"


def spent(usage: Any) -> str:
    """Return the calls, tokens and cost of a `Usage`. An unknown price is called unknown; zeros are left out."""
    stored = f" ({usage.stored_calls:,} of them stored, not paid)" if usage.stored_calls else ""
    cost = dollars(usage.total_cost) if usage.total_calls and usage.total_cost != 0 else ""
    return ", ".join(filter(None, (f"{counted(usage.total_calls, 'call')}{stored}", tokens(usage), cost)))


def tokens(usage: Any) -> str:
    """Return input and output tokens of a `Usage`; empty if there are none, as of the model offline."""
    both = usage.total_input_tokens + usage.total_output_tokens
    return f"{usage.total_input_tokens:,} tokens in and {usage.total_output_tokens:,} out" if both else ""


def dollars(amount: float | None) -> str:
    """Return an amount of US dollars; None is not known, and not zero."""
    return "cost unknown" if amount is None else f"${amount:.4f}"


def counted(number: int, what: str) -> str:
    """Return a number and what it counts: `1 call`, `2 calls`."""
    return f"1 {what}" if number == 1 else f"{number:,} {what}s"
