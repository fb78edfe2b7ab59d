"""The loop of the reference and its types."""
