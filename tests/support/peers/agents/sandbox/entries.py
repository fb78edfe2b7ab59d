"""Entries of a manifest."""

from dataclasses import dataclass


@dataclass
class GitRepo:
    """A repository to clone."""

    repo: str
