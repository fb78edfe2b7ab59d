"""`python -m rlm_broker`."""

from rlm_broker.cli.main import main

main()
