"""One block of code: its time, its output, and what came of it."""
