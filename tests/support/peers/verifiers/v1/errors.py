"""Errors of rollouts."""


class SandboxError(Exception):
    """A sandbox has failed."""
