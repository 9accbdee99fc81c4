"""Grid of runs from one file, each run in a separate process."""
