"""The fork server (zygote): prepares a process once, then forks workers from it. It runs no model code."""
