"""The part of DSPy with its interpreters."""
