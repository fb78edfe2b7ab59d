"""Which model answers, and at whose cost."""
