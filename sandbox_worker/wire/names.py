"""The names that a REPL has, which neither a tool nor a value of the user's can have."""

LLM_QUERY = "llm_query"
LLM_QUERY_BATCHED = "llm_query_batched"
LLM_BATCH = "llm_batch"
RLM_QUERY = "rlm_query"
RLM_QUERY_BATCHED = "rlm_query_batched"
BUDGET = "budget"
FINAL = "FINAL"
FINAL_VAR = "FINAL_VAR"
SUBMIT = "SUBMIT"
SHOW_VARS = "SHOW_VARS"
FUNCTIONS = frozenset(
    {LLM_QUERY, LLM_QUERY_BATCHED, LLM_BATCH, RLM_QUERY, RLM_QUERY_BATCHED, BUDGET}
    | {FINAL, FINAL_VAR, SUBMIT, SHOW_VARS}
)
"""Functions that every REPL has, restored before each block."""

SEARCH = "search"
CHUNKS = "chunks"
LINES = "lines"
"""Functions for large texts, which every REPL begins with: variables like code's own, and names that tools may have."""

CONTEXT = "context"
"""What the question is about. The context of run number n in one REPL is also `context_n`, from `context_0`."""
HISTORY = "history"
"""Messages of earlier turns or runs. Those of run number n in one REPL are `history_n`."""
ANSWER = "answer"
"""Dict that submits its `content` once `ready` is true."""
LAST_VALUE = "_"
"""Value of the last expression that a block showed."""
RESERVED = FUNCTIONS | {CONTEXT, HISTORY, ANSWER, LAST_VALUE}
"""All of these names, without the numbered ones."""


def numbered(name: str, run: int) -> str:
    """Return the name of the context or history of run number `run`, from 0, in one REPL."""
    return f"{name}_{run}"
