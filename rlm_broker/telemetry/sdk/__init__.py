"""The parts that need OpenTelemetry's packages, the extra `otel`."""
