"""Numbers of the descriptors that the processes of a worker have, beside 0, 1 and 2."""

CONTROL_FD = 3
"""Init's control socket to the orchestrator."""
GROUP_FD = 4
"""What puts a process into the REPL's control group. Init has it; `CONNECTION_FD` of the REPL takes the number."""
CONNECTION_FD = 4
"""The REPL's connection to the handler."""
STACK_FD = 5
"""Where the REPL prints the stack of its threads when init asks for it."""
RULESET_FD = 6
"""The Landlock ruleset of the REPL, until it is in force."""
