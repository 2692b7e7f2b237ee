"""The version of castwise."""

__version__ = "0.2.0"
