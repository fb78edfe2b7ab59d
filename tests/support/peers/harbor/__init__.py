"""Stand-in for Harbor 0.26: the base of environments."""
