"""What a model is told. Every number in it comes from the limits that are enforced; no user text is a template."""
