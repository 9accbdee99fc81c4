"""Federations in one process: the same apps without Ray, network or copies of messages."""
