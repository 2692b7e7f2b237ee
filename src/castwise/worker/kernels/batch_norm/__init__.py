"""BatchNorm with its activation and sum in one kernel."""
