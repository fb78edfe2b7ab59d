"""Clients: each module is one way to call a model, and all are a `Client`."""
