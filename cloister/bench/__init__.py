"""Benchmark of privacy's cost on this machine, for one task and configuration, on random inputs: `cloister bench`."""
