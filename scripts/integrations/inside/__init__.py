"""Code for the environment of a peer: plugins that put an adapter in the place of the peer's own, and programs."""
