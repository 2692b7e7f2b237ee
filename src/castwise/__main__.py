"""Run the command line as `python -m castwise`."""

from castwise.cli.app import main

main()
