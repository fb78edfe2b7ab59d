"""Stand-in for verifiers 0.4: the base of runtimes."""
