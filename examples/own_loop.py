"""Run eight REPLs on one handler, in a loop of your own: each with a budget, and one budget for all of them.

You learn `LMHandler.answers`: your loop decides which code runs, and the handler answers what that code asks. It serves
the REPLs by turns, and counts each call where it is made. An agent with a loop of its own works in this way.

It prints for each ticket what its customer wants and how many calls that took, and then what all of them used:

    python examples/own_loop.py
    python examples/own_loop.py --model openai/gpt-5-mini

Without `--model` a function of this file is the model: it judges by a word, and needs no key.
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rlm_broker import RLM, Budget, FunctionClient, Limits, LMHandler, Sandbox

WISHES = [
    "a refund",
    "a new password",
    "a refund",
    "an invoice",
    "a new password",
    "a refund",
    "an invoice",
    "a refund",
]
TICKETS = [f"Ticket {number}\nHello,\n{'blah ' * 500}\nso I want {wish}.\nBye" for number, wish in enumerate(WISHES)]
STEPS = [
    "tail = context.splitlines()[-2:]\nprint(len(context), tail)",
    "FINAL(llm_query(f'What does the customer want? Answer in at most three words.\\n{tail}'))",
]


def judge(messages: Sequence[Mapping[str, Any]]) -> str:
    """Stand in for a model: any function from chat messages to text can be one."""
    _, _, wish = str(messages[-1]["content"]).partition("so I want ")
    return wish.partition(".")[0]


async def work(handler: LMHandler, sandbox: Sandbox, shared: Budget, ticket: str) -> tuple[str | None, int]:
    answers = handler.answers(Limits(max_llm_calls=3), budget=shared, question="What is wanted?")
    async with sandbox.repl(ticket, answer=answers) as repl:
        for code in STEPS:  # a model may choose the next step, by what the last one printed
            block = await repl.aexecute(code, timeout_s=30)
            if block.final_answer is not None:
                return block.final_answer, answers.usage.total_calls
    return None, answers.usage.total_calls


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    model = parser.parse_args().model or FunctionClient(judge)
    shared = Budget(Limits(max_llm_calls=20))
    async with RLM(model, sandbox=Sandbox(warm=8)) as rlm:  # its handler and its sandbox are open within this block
        results = await asyncio.gather(*(work(rlm.handler, rlm.sandbox, shared, ticket) for ticket in TICKETS))
        for number, (wish, calls) in enumerate(results):
            print(f"ticket {number}: {wish}, {calls} call")
        print(f"all: {rlm.handler.get_usage_summary().total_calls} calls, {shared.left()['max_llm_calls']:.0f} left")


if __name__ == "__main__":
    asyncio.run(main())
