"""Pid 1 of a worker: it bounds, watches and ends the REPL."""
