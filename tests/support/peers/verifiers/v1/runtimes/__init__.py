"""Places of rollouts."""
