"""Machines of trials."""
