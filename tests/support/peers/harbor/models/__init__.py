"""Tasks and trials."""
