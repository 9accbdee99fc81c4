"""Attacks on finished runs that measure a mechanism's leakage empirically."""
