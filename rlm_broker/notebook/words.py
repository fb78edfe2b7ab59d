"""Facts about runs and blocks, in a few words for people."""

from typing import Any


def facts_of_run(run: Any) -> str:
    """Return what a `Completion` took and cost, and what ended it."""
    used = run.usage_summary.total
    parts = [
        run.root_model,
        counted(run.iterations, "turn"),
        f"{run.execution_time:.1f} s",
        used_in_words(used),
        *([run.isolation.level] if run.isolation else []),
        *([f"ended at the limit {run.limit}"] if run.limit else []),
        *(["stopped"] if run.is_stopped else []),
    ]
    return ", ".join(parts)


def how_block_ended(block: Any) -> str:
    """Return a block's status, its time, and the limit that ended it."""
    limit = f" at the limit {block.limit}" if block.limit else ""
    return f"{block.status} after {block.execution_time:.2f} s{limit}"


def used_in_words(usage: Any) -> str:
    """Return the calls, tokens and cost of a `Usage`."""
    tokens = f"{usage.total_input_tokens:,}+{usage.total_output_tokens:,} tokens"
    return f"{counted(usage.total_calls, 'call')}, {tokens}, {cost(usage.total_cost)}"


def cost(dollars: float | None) -> str:
    """Return an amount of US dollars; None is not known, and not zero."""
    return "cost unknown" if dollars is None else f"${dollars:.4f}"


def counted(number: int, what: str) -> str:
    """Return a number of things, in the plural unless it is 1."""
    return f"1 {what}" if number == 1 else f"{number:,} {what}s"
