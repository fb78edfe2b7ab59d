"""Texts that a model is given. Every number in them comes from the limits that are enforced; no user text is a
template."""
