"""What runs inside a sandbox: the fork server, a worker's init, its REPL, and how they are isolated."""
