"""Stand-in for deepagents 0.7: what the adapter for it touches."""
