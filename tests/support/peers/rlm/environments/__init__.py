"""The closed list of environments."""

from typing import Any

from rlm.environments.local_repl import LocalREPL


def extract_tool_value(entry: Any) -> Any:
    """Return a tool without its description."""
    return entry["tool"] if isinstance(entry, dict) and "tool" in entry else entry


def get_environment(environment: str, environment_kwargs: dict[str, Any]) -> Any:
    """Return an environment of a kind."""
    if environment == "local":
        return LocalREPL(**environment_kwargs)
    raise ValueError(f"Unknown environment: {environment}")
