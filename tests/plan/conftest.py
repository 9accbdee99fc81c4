"""Shorten the small federations of these tests."""

from quick_runs import coarse_accounts, quick_runs  # noqa: F401
