"""A stand-in of inspect_ai: the part of `inspect_ai.util` that a sandbox has to fit."""
