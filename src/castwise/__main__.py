"""Run the command line as `python -m castwise`."""

from castwise.cli import main

main()
