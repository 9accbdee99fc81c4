"""A grid of runs from one file, each in a process of its own."""
