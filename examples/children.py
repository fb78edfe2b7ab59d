"""A run whose parts need code of their own: each child has a REPL, and `context` in it is its part.

The model here is a script; the prompt of each child says what it is to do.
"""

from rlm_broker import RLM, Limits, LMRequest, ScriptedClient

ORDERS = {"north": [120, 80, 45], "south": [300, 20], "west": [75, 75, 75, 75]}


def model(request: LMRequest) -> str:
    if request.depth == 0:
        return (
            "```repl\n"
            "totals = rlm_query_batched([f'Add up these numbers: {orders}' for orders in context.values()])\n"
            "FINAL(dict(zip(context, totals)))\n"
            "```"
        )
    return "```repl\nimport re\nFINAL(sum(map(int, re.findall(r'\\d+', context))))\n```"


limits = Limits(max_depth=2, max_concurrent_children=2, child_timeout_s=30)
completion = RLM(ScriptedClient(model), limits=limits).completion(ORDERS, "What is the total of each region?")
print(completion.response)
for child in completion.child_traces:
    print(f"depth {child.depth}: {child.prompt_preview} -> {child.result_preview}")
