"""Three levels of REPLs: the root divides by region, its children by shop, and theirs do the work.

`max_depth` counts the levels that have a REPL. What one more level would be is a plain completion: at depth 3
`rlm_query` asks the model, and gives it no REPL. The model here is a script; a real one decides by its prompt.
"""

from rlm_broker import RLM, Event, Limits, LMRequest, RunEnded, ScriptedClient

ORDERS = {"north": {"Oslo": [120, 80], "Bergen": [45]}, "south": {"Rome": [300, 20], "Bari": [5], "Lecce": [8, 2]}}

BY_REGION = """
parts = ["\\n".join(f"{shop}: {orders}" for shop, orders in shops.items()) for shops in context.values()]
FINAL(dict(zip(context, rlm_query_batched(parts))))
"""
BY_SHOP = "FINAL(sum(map(int, rlm_query_batched(context.splitlines()))))"
ADD_UP = "import re\nkind = rlm_query('goods or services?')\nFINAL(sum(map(int, re.findall(r'\\d+', context))))"
CODE = [BY_REGION, BY_SHOP, ADD_UP]


def model(request: LMRequest) -> str:
    if request.is_loop:
        return f"```repl\n{CODE[request.depth]}\n```"
    return "goods"  # depth 3 has no REPL


ended: list[RunEnded] = []


def note(event: Event) -> None:
    if isinstance(event, RunEnded):
        ended.append(event)


rlm = RLM(ScriptedClient(model), limits=Limits(max_depth=3, max_children_total=20), on_event=note)
completion = rlm.completion(ORDERS, "What is the total of each region?")
print(completion.response)
for depth, usage in completion.usage_by_depth.items():
    print(f"depth {depth}: {usage.total_calls} calls")
for run in sorted(ended, key=lambda each: each.run):
    print("  " * run.depth + f"run {run.run}: {run.response}")
