"""Federations in one process: the same app without Ray, network or copies."""
