"""The version of castwise."""

__version__ = "0.1.0"
