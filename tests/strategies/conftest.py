"""Shorten the small federations of these tests."""

from quick_runs import quick_runs  # noqa: F401
