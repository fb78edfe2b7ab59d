"""Contexts: the user's texts, files and values, as bytes that a worker can load."""
