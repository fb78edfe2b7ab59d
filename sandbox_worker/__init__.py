"""The processes inside a sandbox: the fork server, a worker's init and its REPL, with their isolation."""

RELEASE = "0.1.0"
"""Version of this code, equal to `rlm_broker.__version__`. A REPL sends it with `Ready`; the orchestrator refuses any
other release, since an upgrade in place would otherwise mix two of them."""
