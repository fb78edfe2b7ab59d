"""How a model is called. Each module is one way; all of them are a `Client`."""
