"""Runs as spans of OpenTelemetry: the same mapping for runs that go on and for trace files."""
