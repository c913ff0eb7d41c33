"""`python -m simtune`."""

from simtune.cli import main

main()
