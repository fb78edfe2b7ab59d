"""Time limits, fair turns and threads on an event loop. A generic package, without knowledge of runs or models."""
