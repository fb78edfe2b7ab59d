"""Time limits, fair turns and threads on an event loop. Nothing here knows what is run."""
