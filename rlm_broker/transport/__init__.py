"""One conversation with one worker. Nothing here knows what a model is."""
