"""Which models there are, and which client calls each."""
