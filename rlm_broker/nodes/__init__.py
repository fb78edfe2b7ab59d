"""Nodes that give REPLs: an agent on each forks workers, and one link carries all that crosses between it and here."""
