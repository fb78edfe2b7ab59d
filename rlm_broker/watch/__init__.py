"""Eyes on the runs and REPLs of a machine: terminal, notebook, board, viewer and spans."""
