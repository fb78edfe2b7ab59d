"""The version of the package, for traces, journals and spans."""

__version__ = "0.1.0"
