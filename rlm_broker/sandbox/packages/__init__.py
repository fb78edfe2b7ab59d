"""Packages that code may import: those of a user's environment, or of one that is made from a list."""
