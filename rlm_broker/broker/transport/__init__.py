"""The socket protocol between the orchestrator and one worker. A package without knowledge of models."""
