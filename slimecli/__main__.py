"""`python -m slimecli`, which `torchrun -m` starts on every rank."""

from slimecli.cli import main

if __name__ == "__main__":
    main()
