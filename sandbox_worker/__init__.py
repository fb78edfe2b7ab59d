"""What runs inside a sandbox: the fork server, a worker's init, its REPL, and the walls around them."""
