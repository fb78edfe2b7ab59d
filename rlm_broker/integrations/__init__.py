"""Adapters for frameworks: each has their code run in a sandbox of rlm-broker. One module a framework, here a peer.

A peer is imported by the adapter for it and by nothing else. `pip install 'rlm-broker[dspy]'` brings the one for DSPy.
"""
