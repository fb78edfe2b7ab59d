"""The HTTP server of `rlm-broker serve`: uvicorn's, with bounds on what a client without a key can take."""
