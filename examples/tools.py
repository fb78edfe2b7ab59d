"""Functions of yours that the model's code may call: they run here, with their arguments validated."""

from rlm_broker import RLM, ScriptedClient

STOCK = {"lens": 4, "tripod": 0}


def in_stock(item: str, at_least: int = 1) -> bool:
    """Whether we have that many of an item."""
    return STOCK[item] >= at_least


REPLIES = [
    "```repl\ntry:\n    in_stock('telescope')\nexcept Exception as error:\n    print(error)\n```",
    "```repl\nFINAL([item for item in context if in_stock(item)])\n```",
]
completion = RLM(ScriptedClient(REPLIES), tools={"in_stock": in_stock}).completion(["lens", "tripod"], "What is there?")
print(completion.response)
print(completion.trajectory[0].blocks[0].stdout.splitlines()[0])
