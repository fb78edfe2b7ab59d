"""Providers of sandboxes."""
