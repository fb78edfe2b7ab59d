"""Values and checks that every room may use."""
