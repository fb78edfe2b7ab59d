"""The attacker: `python -m scripts.siege.attacker ATTACK PORT TOKEN` prints a line once it has done what it can."""

import sys

from scripts.siege.attacks import ATTACKS


def main() -> None:
    attack, port, token = sys.argv[1:]
    said = False
    for _ in ATTACKS[attack](int(port), token):
        if not said:
            said = True
            print("done", flush=True)
    sys.stdin.read()  # stay, connected, until the orchestrator has seen enough


if __name__ == "__main__":
    main()
