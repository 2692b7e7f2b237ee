"""The report as one HTML file that opens offline."""
