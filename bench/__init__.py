"""Benchmarks and replayed contracts: every command prints what it measured beside what was expected."""
