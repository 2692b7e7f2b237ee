"""The data of trials."""
