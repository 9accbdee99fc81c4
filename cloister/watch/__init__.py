"""Watching a federation: what is wrong with it now, in a line each, as metrics, and as calls to somebody awake."""
