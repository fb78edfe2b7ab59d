"""Errors of an agent, and how it cuts texts."""

from typing import Any


class AgentError(Exception):
    """Base of an agent's errors. Each is logged when it is made."""

    def __init__(self, message: str, logger: Any) -> None:
        super().__init__(message)
        self.message = message
        logger.log_error(message)


class AgentExecutionError(AgentError):
    """A step has failed."""


def truncate_content(content: str, max_length: int) -> str:
    """Cut a text in its middle."""
    if len(content) <= max_length:
        return content
    half = max_length // 2
    return f"{content[:half]}\n..._truncated_...\n{content[-half:]}"
