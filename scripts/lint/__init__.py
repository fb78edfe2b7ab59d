"""Rules that this repository holds beside ruff's and mypy's, each checked once over all files."""
