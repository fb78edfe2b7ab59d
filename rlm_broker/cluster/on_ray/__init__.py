"""A cluster of the nodes of a Ray cluster. The extra `ray` has what it needs."""
