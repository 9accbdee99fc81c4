"""HTML report of a run for a compliance officer, and an entry for OpenDP's registry of deployments."""
