"""Isolation levels: what each promises, whether it holds on this machine, and the remedy if it does not."""
