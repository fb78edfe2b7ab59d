"""Stand-in for openai-agents 0.24: the parts of its sandboxes that the adapter touches."""
