"""Code that the offline model runs in the REPL.

`strategy` sends the source of these modules, so that linters and type checkers cover it. They use the standard library,
each other, and the abilities that model code has; functions of the REPL come as arguments. They work on contexts of any
size: a search uses `str` methods on the whole text, and a table is read row by row and never kept.
"""

from rlm_broker.clients.offline.repl_code import (
    binding,
    computing,
    conditions,
    logs,
    parts,
    search,
    tables,
    tasks,
    text_counts,
)

__all__ = ["binding", "computing", "conditions", "logs", "parts", "search", "tables", "tasks", "text_counts"]
