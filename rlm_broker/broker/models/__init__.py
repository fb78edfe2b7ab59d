"""Models as users describe them, and the clients that call them."""
