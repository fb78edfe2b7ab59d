"""Events of sessions."""


class Instrumentation:
    """Receivers of events."""
