"""A stand-in for the reference RLM: its environments, in our own words."""
