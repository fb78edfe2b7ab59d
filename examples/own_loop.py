"""A loop of your own: eight REPLs, one handler, a budget for each REPL and one for all of them.

The policy here writes the same code for each rollout, and the model that the code asks is a script; in RL training both
would be models. What each rollout used is exact: it is counted where the calls are made.
"""

import asyncio

from rlm_broker import Budget, Limits, LMHandler, Sandbox, ScriptedClient

TASKS = [f"task {number}: " + "words " * number for number in range(8)]
CODE = ["parts = context.split()\nlen(parts)", "FINAL(llm_query(f'Is {parts[1]} even?'))"]
READER = ScriptedClient(lambda request: "yes" if int(str(request.messages[-1].content)[3]) % 2 == 0 else "no", "reader")


def policy(seen: list[str]) -> str | None:
    """What to run next, given what the blocks so far have printed; None ends the rollout."""
    return CODE[len(seen)] if len(seen) < len(CODE) else None


async def rollout(handler: LMHandler, sandbox: Sandbox, shared: Budget, task: str) -> tuple[str | None, int]:
    answers = handler.answers(Limits(max_llm_calls=4), budget=shared, question=task)
    seen: list[str] = []
    async with sandbox.repl(task, answer=answers) as repl:
        while (code := policy(seen)) is not None:
            block = await repl.aexecute(code, timeout_s=5)
            seen.append(block.stdout or block.error or "")
            if block.final_answer is not None:
                return block.final_answer, answers.usage.total_calls
    return None, answers.usage.total_calls


async def main() -> None:
    shared = Budget(Limits(max_llm_calls=20))
    async with LMHandler(READER) as handler, Sandbox(warm=4) as sandbox:
        results = await asyncio.gather(*(rollout(handler, sandbox, shared, task) for task in TASKS))
        for task, (answer, calls) in zip(TASKS, results, strict=True):
            print(f"{task[:6]}: {answer}, {calls} call")
        print(f"all: {handler.get_usage_summary().total_calls} calls, {shared.left()['max_llm_calls']:.0f} left")


asyncio.run(main())
