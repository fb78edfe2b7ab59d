"""Packages that code may import: of an environment of the user's, or of one that is made from a list."""
