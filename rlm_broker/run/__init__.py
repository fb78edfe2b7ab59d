"""One run and its tree of children."""
