"""Recursive Language Models on untrusted code."""
