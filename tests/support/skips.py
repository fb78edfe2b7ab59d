"""Why tests are skipped: one wording for one reason, so that the summary of a run folds them into one line each."""

NEEDS_ROOT = "needs root"
NEEDS_ORDINARY_USER = "needs an ordinary user"
NEEDS_SOCKET_FILTERS = "needs a kernel that lets this user attach a filter to a socket"
NEEDS_CRUN = "needs crun"
ONE_PROCESS = "at the level standard a REPL is one process"
