"""A run as it happens: each event, then the completion."""

import asyncio

from rlm_broker import RLM, BlockPrinted, CallEnded, IterationStarted, ScriptedClient

REPLIES = ["```repl\nprint(len(context))\nprint(llm_query('Say hello.'))\n```", "hello", "FINAL(that was all)"]


async def main() -> None:
    run = RLM(ScriptedClient(REPLIES)).start("some text", "What is there?")
    async for event in run.events():
        match event:
            case IterationStarted(number=number):
                print(f"turn {number}")
            case BlockPrinted(text=text):
                print(f"  printed: {text.strip()}")
            case CallEnded(call=call, usage=usage):
                print(f"  call {call}: {usage.total_output_tokens} tokens out")
    print(f"answer: {(await run).response}")


asyncio.run(main())
