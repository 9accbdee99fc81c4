"""Tests of nodes run small federations, and keep many ledgers."""

from quick_runs import quick_runs  # noqa: F401
