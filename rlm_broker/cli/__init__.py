"""Commands. Each parses, makes one library call, prints; nothing is decided here."""
