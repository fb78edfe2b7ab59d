"""One block of code: its time, its output, and its outcome."""
