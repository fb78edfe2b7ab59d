"""Runs in a browser: one page for a trace file and for live runs."""
