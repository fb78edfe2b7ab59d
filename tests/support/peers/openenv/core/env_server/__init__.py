"""The server of an environment."""
