"""An answer of a type: what does not fit goes back to the model with the reason."""

import pydantic

from rlm_broker import RLM, ScriptedClient


class Person(pydantic.BaseModel):
    name: str
    born: int


REPLIES = [
    "FINAL(Ada, in the year 1815)",
    '```repl\nimport json\nFINAL(json.dumps({"name": "Ada Lovelace", "born": 1815}))\n```',
]
client = ScriptedClient(REPLIES)
completion = RLM(client).completion("Ada Lovelace was born in 1815.", "Who is it about?", output_type=Person)
assert isinstance(completion.parsed, Person)
print(completion.parsed.name, completion.parsed.born)
print(f"asked {len(client.requests)} times")
