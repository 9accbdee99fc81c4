"""Packages of a user's own, written by `cloister new`: they run at once, and are there to be changed."""
