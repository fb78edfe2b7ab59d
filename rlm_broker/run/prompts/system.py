"""The system prompt, from the facts of a run: the names in its REPL, a way to work, and the limits."""

import hashlib
from collections.abc import Sequence

from msgspec import Struct

from rlm_broker.limits import Limits
from rlm_broker.run.prompts.instructions import Profile
from rlm_broker.run.prompts.messages import ALL_FAILED, CUT, FIRST_OF_MANY, PICTURE, SUMMARISE, Messages
from rlm_broker.run.prompts.observation import most_shown
from sandbox_worker.wire.names import CONTEXT

USUAL_CHARS = 100_000
"""Maximum characters of a prompt to a model without a known window. Most models read as many."""
_HELPERS = {
    "search": "`search(pattern, text)`: all places where a regular expression is found; `len` counts them, and each "
    "has `line`, `start`, `end`, `text`, `around`, and `part`, its key or index in a dict or list of texts.",
    "chunks": "`chunks(text, size, overlap=0)`: a sequence of parts, each a `str`.",
    "lines": "`lines(text, first, last)`: lines as one `str`, by number from 1, both included.",
}
"""Helpers of the REPL by name, with their words in the prompt. A tool of the same name replaces its helper."""
MEANS = {
    "max_llm_calls": "{:,} calls of models",
    "max_tokens": "{:,} tokens",
    "max_budget_usd": "${:g}",
    "run_timeout_s": "{:g} s",
}
"""Limit of a whole tree of runs → how a model is told of it."""
FULL_PROMPTS = 20
"""Prompts of a good batch, each nearly as long as the window. Thousands of tiny ones cost more, and know less each."""
SMALL_WINDOW_TOKENS = 16_000
"""Window in tokens below which a model gets the compact prompt."""


class Facts(Struct, frozen=True):
    """Facts of one run for its system prompt.

    Attributes:
        limits: The enforced limits.
        depth: Depth of the run; 0 is the root.
        reads_chars: Longest prompt of `llm_query`, in characters; None if it is not known.
        window_tokens: Window of the run's own model, in tokens; None if it is not known.
        models: Name and description of each further model for code.
        packages: Packages for code, beside the standard library.
        python: Version of Python, for example "3.12".
        tools: A line for each function and value of the user's.
        tool_names: Names of these. They replace helpers of the same names.
        context: Variable with the context. `context_1` is the second context of a persistent REPL.
    """

    limits: Limits
    depth: int = 0
    reads_chars: int | None = None
    window_tokens: int | None = None
    models: Sequence[tuple[str, str]] = ()
    packages: Sequence[str] = ()
    python: str = ""
    tools: Sequence[str] = ()
    tool_names: Sequence[str] = ()
    context: str = CONTEXT

    @property
    def shown_chars(self) -> int:
        """Characters of a turn's output for the model."""
        return most_shown(self.limits.max_observation_chars, self.window_tokens)

    @property
    def has_children(self) -> bool:
        """Whether a child of this run would have a REPL."""
        return self.depth + 1 < self.limits.max_depth


def system_prompt(facts: Facts, profile: Profile = "both") -> str:
    """Return the system prompt of a run."""
    if profile == "compact":
        return _compact(facts)
    sections = [
        _role(facts),
        _names(facts),
        _way_of_working(facts),
        _examples(facts, profile),
        _bounds(facts),
        ending(profile),
    ]
    return "\n\n".join(sections)


def fitting(profile: Profile, window_tokens: int | None) -> Profile:
    """Return the profile for a model: `compact` in place of `both`, if its window is small."""
    is_small = window_tokens is not None and window_tokens < SMALL_WINDOW_TOKENS
    return "compact" if profile == "both" and is_small else profile


def ending(profile: Profile) -> str:
    """Return the part of the system prompt about the end of a run."""
    final = (
        "End with `FINAL(value)` in a repl block, or with `FINAL_VAR('name')` for a long value that a variable holds. "
        "Without code in the reply, `FINAL(the answer)` on a line of its own does the same."
    )
    answer = (
        "Keep your best answer so far in `answer['content'] = ...`: if the run has to stop, that is what is returned. "
        "To end the run, also set `answer['ready'] = True`."
    )
    told = {"final": final, "answer": f"{answer} Do this in a repl block."}.get(profile, f"{final} {answer}")
    return f"{told} Submit only what you have seen in an output, not what you expect to see."


def prompts_digest(profile: Profile) -> str:
    """Return a digest of our own words to models. It changes with the release, not with the settings."""
    says = Messages("", profile)
    told = [says.reminder(1), says.last_request(), says.unseen(""), says.not_looked(), SUMMARISE]
    told += [says.failed(""), ALL_FAILED, CUT, FIRST_OF_MANY, PICTURE]
    told += [system_prompt(Facts(Limits(max_depth=2), depth), profile) for depth in (0, 1)]
    return hashlib.blake2b("\0".join(told).encode(), digest_size=8).hexdigest()


def _role(facts: Facts) -> str:
    repl = (
        f"The context is the variable `{facts.context}` of a Python REPL, and you work on it by writing code. Code "
        "that you put into a fence tagged `repl` is run, and you are shown what it prints, and the value of its last "
        "expression. Variables live on from block to block.\n"
        f"```repl\nprint(type({facts.context}), len({facts.context}))\n```"
    )
    if facts.depth == 0:
        return f"You answer a question about a context that is too large to read at once. {repl}"
    return (
        "You are a child run: code of another run has handed you a task and a context, which may be too large to read "
        f"at once. That code goes on with the text of your answer and sees nothing else of your work, so answer the "
        f"task completely, in the form that it asks for, and without remarks on how you did it. {repl}"
    )


def _names(facts: Facts) -> str:
    limits = facts.limits
    reads = (
        f"Keep a prompt under {USUAL_CHARS:,} characters."
        if facts.reads_chars is None
        else (f"It can read {facts.reads_chars:,} characters.")
    )
    helpers = [f"- {told}" for name, told in _HELPERS.items() if name not in facts.tool_names]
    lines = [
        "In the REPL there are:",
        f"- `{facts.context}`: the data. Search and slice it; print small parts of it.",
        "- `llm_query(prompt)`: asks a language model, which sees nothing but the prompt, and returns its text."
        f" {reads} A prompt may also be a list of chat messages, or of content parts with pictures (data: addresses).",
        f"- `llm_query_batched(prompts)`: the same for a list, {limits.max_concurrent_calls} at a time, in the order "
        f"of the prompts. About {FULL_PROMPTS} prompts that are nearly full do more, and sooner, than thousands of "
        f"tiny ones; {limits.max_batch_prompts:,} are the most.",
        *_child_lines(facts),
        "- Keywords of these calls: `model=`, `output_type=` (a JSON Schema or a pydantic model: you get the value, "
        "and not its text); of llm_query and its batch `system=`, `max_tokens=`, `temperature=`; of batches of it "
        "`timeout_s=` (what is late is an error in its place) and `samples=True` (equal prompts are asked each).",
        *_model_lines(facts),
        *helpers,
        "- `SHOW_VARS()`: your variables and their types. `budget()`: what you may still use, by limit.",
        *facts.tools,
        "A call of a model or child that fails returns a text that starts with `Error:`, and does not raise."
        + (" Other functions raise." if facts.tools else "")
        + " These names are put in place again before each block: keep what you make of them under names of your own.",
        _python(facts),
    ]
    return "\n".join(lines)


def _child_lines(facts: Facts) -> list[str]:
    limits = facts.limits
    if not facts.has_children:
        return ["- `rlm_query(task, context=part)`: at this depth a plain `llm_query` about part and task."]
    total = limits.max_children_total
    most = "" if total is None else f", {total:,} in all"
    return [
        "- `rlm_query(task, context=part)`: a child that works like you, in a REPL of its own whose `context` is "
        "`part` (a text of any length, a list or a dict). It returns the child's answer as text.",
        f"- `rlm_query_batched(tasks, contexts=parts)`: one child for each, {limits.max_concurrent_children} at a time"
        f"{most}. For parts that need several steps; a child costs as much as many calls of `llm_query`.",
        "- `child = rlm_start(task, context=part)`: the same, while your code goes on, also in later blocks. "
        "`child.result(timeout_s=None)` waits for the answer, `child.done` says whether it is there, `child.cancel()` "
        "ends the child, and `first(k, children)` waits for k of them. With `keep=True` the child's REPL stays: "
        "`child.ask(task)` gives it one more task, with its variables, and returns a child.",
    ]


def _model_lines(facts: Facts) -> list[str]:
    if not facts.models:
        return []
    named = "; ".join(f"`{name}` ({what})" for name, what in facts.models)
    return [f"- Models for `model=`, beside the usual one: {named}."]


def _python(facts: Facts) -> str:
    version = f"This is Python {facts.python}. " if facts.python else ""
    packages = (
        f"Beside the standard library there are, among others, {_listed(facts.packages)}. " if facts.packages else ""
    )
    return (
        f"{version}{packages}`await` works at the top of a block, and threads may call models too. There is no "
        "network, and files can be written in the current folder alone."
    )


def _way_of_working(facts: Facts) -> str:
    child = " A part that needs its own search and several steps is for `rlm_query`." if facts.has_children else ""
    return (
        "How to work:\n"
        "1. Probe: type, size and structure of the context, and a few small samples from its beginning, middle and end."
        "\n"
        "2. Plan: say in a sentence or two which steps will answer the question.\n"
        "3. Let code find and count: words, numbers, dates and structure are for `search`, regular expressions and "
        "parsing; code is exact and costs nothing.\n"
        "4. Let `llm_query` read: meaning, tone, paraphrases and summaries are for a model. Put as much into one "
        f"prompt as it can read, say what you want back, and ask many parts as one batch.{child}\n"
        "5. Verify: look at the places that decide, and check what a call has told you where it matters.\n"
        "6. Submit what you have seen.\n"
        "What you print stays in this conversation for good, so print little. Keep long texts and partial results in "
        "variables, and pass them on by name."
    )


def _examples(facts: Facts, profile: Profile) -> str:
    chars = f"{_part_chars(facts):_}"
    batch = (
        "An example with batches: code filters first, models read what is left, and each prompt joins what fits:\n"
        "```repl\n"
        "near = search(r'(?i)deliver|courier|parcel', context, around=500)\n"
        f"parts = chunks('\\n---\\n'.join(each.around for each in near), {chars})\n"
        f"# without words to look for: parts = chunks(context, {chars}, overlap=500)\n"
        "task = 'Which complaints about delivery are in this text? Quote each.'\n"
        "for step in range(4):  # until one list is left\n"
        "    found = llm_query_batched([f'{task}\\n\\n{part}' for part in parts])\n"
        f"    parts, task = chunks('\\n'.join(found), {chars}), 'Join these lists and drop doubles.'\n"
        "    if len(found) <= 1: break\n"
        "print(len(near), len(found), found[:1])\n"
        "```"
    )
    if not facts.has_children:
        return batch
    end = "answer['content'] = report; answer['ready'] = True" if profile == "answer" else "FINAL_VAR('report')"
    return (
        f"{batch}\n"
        "And one with children, where `context` is a dict of files; the report is submitted in the next block, when "
        f"its beginning has been seen, by `{end}`:\n"
        "```repl\n"
        "names = [name for name, text in context.items() if search('refund', text)]\n"
        "answers = rlm_query_batched(['List each refund with date and amount, as JSON.'] * len(names), "
        "contexts=[context[name] for name in names])\n"
        "report = '\\n'.join(f'{name}: {text}' for name, text in zip(names, answers))\n"
        "print(report[:1_000])\n"
        "```"
    )


def _part_chars(facts: Facts) -> int:
    """Return the length of a part in the example: 3/4 of a call's window, in characters, as a round number."""
    reads = facts.reads_chars or USUAL_CHARS
    return rounded_down(max(1_000, reads * 3 // 4), 1)


def rounded_down(number: int, digits: int) -> int:
    """Return a number with zeros behind its first digits."""
    shown = str(number)
    return int(shown[:digits].ljust(len(shown), "0"))


def _bounds(facts: Facts) -> str:
    limits = facts.limits
    means = told_means(limits)
    return (
        f"What one reply's blocks print is cut to {facts.shown_chars:,} characters. A block may compute for "
        f"{limits.block_timeout_s:g} s, waiting for models not counted; then it is interrupted, and if it does not "
        "react it is killed, and its variables may be lost. "
        f"You have {limits.iterations(facts.depth)} turns; a reply is a turn. Submit the best that you have before "
        "they are used up."
        + (f" You and your children have {means} in all: `budget()` says what is left." if means else "")
    )


def told_means(limits: Limits) -> str:
    """Return the means that the user has set for a tree of runs; empty if none of them was set."""
    told = []
    for name, value in limits.given.items():
        if name in MEANS and value is not None:
            told.append(MEANS[name].format(value))
    return _listed(told) if told else ""


def _compact(facts: Facts) -> str:
    limits, name = facts.limits, facts.context
    reads = "" if facts.reads_chars is None else f" (it reads {facts.reads_chars:,} characters)"
    child = "`rlm_query(task, context=part)`: a child with a REPL of its own. " if facts.has_children else ""
    search = "" if "search" in facts.tool_names else "`search(pattern, text)` finds all places. "
    what = "the task of the run that started you" if facts.depth else "a question"
    return (
        f"You answer {what} about `{name}`, a variable of a Python REPL. Code in a fence tagged `repl` is run, and you "
        f"are shown what it prints:\n```repl\nprint(type({name}), len({name}), str({name})[:500])\n```\n"
        f"`llm_query(prompt)`: asks a language model{reads} that sees only the prompt. `llm_query_batched(prompts)`: "
        f"the same for a list. {child}{search}A failed call returns a text that starts "
        "with `Error:`.\n"
        + "".join(f"{line}\n" for line in facts.tools)
        + "First look at the context. Find by code, let "
        f"`llm_query` read what code cannot judge. Print little: {facts.shown_chars:,} characters of a "
        f"reply's output are shown. You have {limits.iterations(facts.depth)} turns"
        + (f", and {means} in all with your children" if (means := told_means(limits)) else "")
        + ". When you have seen the answer in "
        "an output, end with `FINAL(answer)` on a line of its own, in a reply without code."
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
