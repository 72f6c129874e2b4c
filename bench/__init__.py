"""What protection costs: measurements, each with what it is compared to in the same run; see `python -m bench -h`."""
