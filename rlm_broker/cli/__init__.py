"""Commands. Each one parses its arguments, makes one call of the library, and prints the result.

Decisions belong to the library: a program that uses it must be able to do what a command does.
"""
