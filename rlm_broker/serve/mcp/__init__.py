"""Tools for clients of the Model Context Protocol: a sandbox, and questions about large contexts."""
