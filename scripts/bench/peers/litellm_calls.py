"""litellm by itself: calls a second to the OpenAI-compatible server whose address is the argument."""

import asyncio
import json
import os
import sys
import time

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it else asks the network for prices

import litellm

CALLS, AT_ONCE = 200, 32


async def calls() -> list[float]:
    """Calls a second, `AT_ONCE` at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def call() -> None:
        async with places:
            await litellm.acompletion(
                "openai/test", [{"role": "user", "content": "hello"}], api_base=sys.argv[1], api_key="none"
            )

    await call()
    started = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(CALLS)))
    return [CALLS / (time.perf_counter() - started)]


loop = asyncio.new_event_loop()
for _ in sys.stdin:
    print(json.dumps(loop.run_until_complete(calls())), flush=True)
