"""Sandboxes: a worker's start, its time and its end. Usable without any model."""
