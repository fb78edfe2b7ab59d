"""A stand-in for DSPy: the contract of its code interpreters, in our own words."""
