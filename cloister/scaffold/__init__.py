"""Packages from `cloister new`: they run at once, as a base for the user's changes."""
