"""Where workers come from, and how each is held and ended."""
