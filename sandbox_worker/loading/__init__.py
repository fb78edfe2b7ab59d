"""How a context becomes a Python value: `form` says how it lies in its memfd, `context` loads it from there."""
