"""`python -m slimecli`, which `torchrun -m` starts on every rank."""

from slimecli.cli import main

main()
