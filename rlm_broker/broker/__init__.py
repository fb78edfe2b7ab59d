"""The broker: which client answers a call, and when."""
