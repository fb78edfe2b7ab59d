"""Stand-in for deepagents-code 0.1: providers of sandboxes for its command line."""
