"""Texts that a model is given. Every number in them comes from the enforced limits; no user text is a
template."""
