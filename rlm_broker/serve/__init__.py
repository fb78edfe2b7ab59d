"""An OpenAI-compatible server of runs and sandboxes."""
