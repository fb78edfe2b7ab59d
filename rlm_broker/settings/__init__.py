"""Settings from flags, environment and files."""
