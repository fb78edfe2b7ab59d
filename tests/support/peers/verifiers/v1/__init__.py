"""Its second interface."""
