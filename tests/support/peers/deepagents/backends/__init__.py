"""Backends of an agent."""
