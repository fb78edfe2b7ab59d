"""The agent of a node: it runs whole runs, and asks the orchestrator for models, tools and verdicts."""
