"""What runs inside a sandbox: the fork server, a worker's init, its REPL, and how they are isolated."""

RELEASE = "0.1.0"
"""Of this code, as `rlm_broker.__version__`. A REPL says it when it is ready."""
