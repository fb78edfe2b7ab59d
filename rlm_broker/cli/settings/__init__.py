"""Settings of the command line: where they come from, which need trust, and the files they name."""
