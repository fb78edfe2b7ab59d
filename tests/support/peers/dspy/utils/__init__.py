"""The part of DSPy with its callbacks."""
