"""Make RL rollouts: several samples of each task, many at a time, scored, and written as chat messages in JSON Lines.

You learn to run many rollouts on one handler and one sandbox, to score them, and to keep failed ones: a run that ended
at a limit has its messages, too. A trainer reads the file: each line is one rollout.

It prints the mean reward of each task, and the file:

    python examples/rl_rollouts.py
    python examples/rl_rollouts.py --model qwen3 --base-url http://gpu:8000/v1 --samples 16 --at-a-time 64

Without `--model` the policy is a script that is right in some samples and wrong in others: no key and no GPU.
"""

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from rlm_broker import RLM, Completion, Limits, Model, RunFailed, Sandbox, ScriptedClient

TASKS = [random.Random(seed).choices(range(1000), k=200) for seed in range(4)]
QUESTION = "The context is a list of numbers. How many of them are larger than 500?"
RIGHT = "```repl\nFINAL(sum(number > 500 for number in context))\n```"
WRONG = "```repl\nFINAL(len(context))\n```"
LOST = "```repl\nprint(context[:5])\n```"
LIMITS = Limits(max_iterations=3, max_llm_calls=3, run_timeout_s=120, memory_bytes=256 << 20)


def score(rollout: Completion | RunFailed, expected: int) -> float:
    """Return the reward: 1 for the right number, 0.1 for another number, 0 for anything else."""
    answer = rollout.response if isinstance(rollout, Completion) else None
    return 1.0 if answer == str(expected) else 0.1 if (answer or "").isdigit() else 0.0


def stand_in(task: int, sample: int) -> ScriptedClient:
    first = random.Random(f"{task} {sample}").choice([RIGHT, RIGHT, WRONG, LOST])
    return ScriptedClient([first, LOST, LOST])


async def rollout(rlm: RLM, places: asyncio.Semaphore, task: int, sample: int, is_scripted: bool) -> dict[str, Any]:
    done: Completion | RunFailed
    async with places:
        try:
            done = await rlm.acompletion(TASKS[task], QUESTION, model=stand_in(task, sample) if is_scripted else None)
        except RunFailed as failed:
            done = failed
    messages = [{"role": message.role, "content": message.content} for message in done.messages]
    reward = score(done, sum(number > 500 for number in TASKS[task]))
    return {"task": task, "sample": sample, "reward": reward, "turns": len(done.trajectory), "messages": messages}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--base-url")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--at-a-time", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir(), "rollouts.jsonl"))
    given = parser.parse_args()
    model = Model(name=given.model, base_url=given.base_url, options={"temperature": 1}) if given.model else "offline"
    places = asyncio.Semaphore(given.at_a_time)
    wanted = [(task, sample) for task in range(len(TASKS)) for sample in range(given.samples)]
    async with RLM(model, limits=LIMITS, sandbox=Sandbox(LIMITS, warm=given.at_a_time)) as rlm:
        rollouts = await asyncio.gather(*(rollout(rlm, places, *each, given.model is None) for each in wanted))
    given.out.write_text("".join(json.dumps(each) + "\n" for each in rollouts))
    for task in range(len(TASKS)):
        rewards = [each["reward"] for each in rollouts if each["task"] == task]
        print(f"task {task}: mean reward {sum(rewards) / len(rewards):.2f} of {len(rewards)} samples")
    print(f"{len(rollouts)} rollouts in {given.out}")


if __name__ == "__main__":
    asyncio.run(main())
