"""The REPL: the process that runs model code."""
