"""Names of a REPL's own functions and variables."""

LLM_QUERY = "llm_query"
LLM_QUERY_BATCHED = "llm_query_batched"
LLM_BATCH = "llm_batch"
RLM_QUERY = "rlm_query"
RLM_QUERY_BATCHED = "rlm_query_batched"
RLM_START = "rlm_start"
BUDGET = "budget"
FINAL = "FINAL"
FINAL_VAR = "FINAL_VAR"
SUBMIT = "SUBMIT"
SHOW_VARS = "SHOW_VARS"
FUNCTIONS = frozenset(
    {LLM_QUERY, LLM_QUERY_BATCHED, LLM_BATCH, RLM_QUERY, RLM_QUERY_BATCHED, RLM_START, BUDGET}
    | {FINAL, FINAL_VAR, SUBMIT, SHOW_VARS}
)
"""Names of the functions of every REPL. The REPL restores them before each block."""

SEARCH = "search"
CHUNKS = "chunks"
LINES = "lines"
FIRST = "first"
"""Names of the functions for large texts, and for waiting. Every REPL starts with them as ordinary variables: code may
reassign them, and a tool may have such a name."""

CONTEXT = "context"
"""Name of the context. The context of run number n in one REPL is also `context_n`, from `context_0`."""
HISTORY = "history"
"""Name of the messages of earlier turns or runs. Messages of run number n in one REPL are also `history_n`."""
TASK = "task"
"""Name of the variable with the whole of a long task, in a child that has a context beside it."""
ANSWER = "answer"
"""Name of the dict for an answer: its `content` is submitted once its `ready` is true."""
LAST_VALUE = "_"
"""Name of the value of the last expression shown by a block."""
RESERVED = FUNCTIONS | {CONTEXT, HISTORY, ANSWER, LAST_VALUE}
"""Names refused for tools and for values of the user's. `context_n` and `history_n` are reserved as well."""


def numbered(name: str, run: int) -> str:
    """Return the name of the context or history of run number `run`, from 0, in one REPL."""
    return f"{name}_{run}"
