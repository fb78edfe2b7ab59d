"""Runs on other machines: one broker for all model calls, and an agent on each node."""
