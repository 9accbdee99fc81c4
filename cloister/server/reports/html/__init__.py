"""HTML report of a run for a compliance officer."""
