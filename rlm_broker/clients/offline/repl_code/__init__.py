"""What the offline model writes in the REPL: `strategy` sends the source of these modules, so tools see them too.

They use the standard library and each other, and what model code may use: the names of the REPL are arguments. They run
on contexts of any size: a search uses `str` methods over all of a text, and a table is read row by row and never kept.
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
