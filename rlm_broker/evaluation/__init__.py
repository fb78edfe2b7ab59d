"""Measurement of a model on questions with known answers: plainly asked, and by runs with a REPL."""
