"""Events of runs, as frozen values, and the ways to write them down. Runs pass them to callbacks."""
