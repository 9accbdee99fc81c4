"""A page for people about a federation: read-only, on this machine, or behind an operator's token elsewhere."""
