"""Abilities of an environment."""

from types import SimpleNamespace

EnvironmentCapabilities = EnvironmentResourceCapabilities = SimpleNamespace
