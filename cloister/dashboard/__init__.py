"""Page about a federation: read-only, on this machine, or behind a proxy elsewhere."""
