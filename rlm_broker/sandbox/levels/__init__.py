"""Isolation levels: what each promises, whether it holds here, and what to do where it does not."""
