"""Stand-in for nemo-gym 0.4: what a provider of sandboxes is asked and answers."""
