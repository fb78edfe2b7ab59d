"""Paths of this repository."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
"""The folder of `pyproject.toml`."""
