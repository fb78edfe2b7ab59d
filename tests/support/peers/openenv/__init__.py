"""Stand-in for OpenEnv: the result that its executors return, in our own words."""
