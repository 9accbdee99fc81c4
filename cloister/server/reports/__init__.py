"""Output of a run, during the run and at its end."""
