"""Nodes that give REPLs: an agent on each forks workers, and one link connects it with the orchestrator."""
