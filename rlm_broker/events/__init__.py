"""Events of runs and REPLs: observers, the log, files of traces, and the story for people."""
