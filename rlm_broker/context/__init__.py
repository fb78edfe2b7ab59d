"""What the user hands in, as bytes that a worker can load."""
