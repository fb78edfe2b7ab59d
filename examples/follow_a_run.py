"""A run as it happens: each event, then the completion."""

import asyncio

from rlm_broker import RLM, Completion, ScriptedClient
from rlm_broker.trace.events import BlockPrinted, CallEnded, IterationStarted

REPLIES = ["```repl\nprint(len(context))\nprint(llm_query('Say hello.'))\n```", "hello", "FINAL(that was all)"]


async def main() -> None:
    async for event in RLM(ScriptedClient(REPLIES)).stream("some text", "What is there?"):
        match event:
            case IterationStarted(number=number):
                print(f"turn {number}")
            case BlockPrinted(text=text):
                print(f"  printed: {text.strip()}")
            case CallEnded(call=call, usage=usage):
                print(f"  call {call}: {usage.total_output_tokens} tokens out")
            case Completion(response=response):
                print(f"answer: {response}")


asyncio.run(main())
