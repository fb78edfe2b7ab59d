"""Injects faults into runs, and says what was lost, what was left, and what the caller was told."""
