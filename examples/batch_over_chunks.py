"""Ask about each part of a long text at once, and add up: the model's code does it with one batch.

The model here is a script, so that this runs anywhere; name a real one, such as RLM("openai/gpt-5-mini").
"""

from rlm_broker import RLM, ScriptedClient

REVIEWS = "\n---\n".join(f"Review {number}: {'I loved it' if number % 3 else 'Not for me'}." for number in range(30))

ROOT = ScriptedClient(
    [
        "I ask about each review, all at once.\n"
        "```repl\n"
        "parts = context.split('\\n---\\n')\n"
        "answers = llm_query_batched([f'Is this review positive? Say yes or no.\\n{part}' for part in parts])\n"
        "FINAL(f\"{sum(answer == 'yes' for answer in answers)} of {len(parts)} are positive\")\n"
        "```"
    ],
    "root",
)
READER = ScriptedClient(lambda request: "yes" if "loved" in str(request.messages[-1].content) else "no", "reader")

completion = RLM(ROOT, READER).completion(REVIEWS, "How many reviews are positive?")
print(completion.response)
for model, usage in completion.usage_summary.model_usage_summaries.items():
    print(f"{model}: {usage.total_calls} calls")
