"""What happened, as frozen events, and how they are written down. Values only: events come through a callback."""
