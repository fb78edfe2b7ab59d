"""Loading of a context as a Python value: `form` describes its layout in a memfd, `context` loads it from there."""
