"""Eighteen ownership contracts, run alike over the threaded schemes and over ringfence by `python -m bench.replay`."""
