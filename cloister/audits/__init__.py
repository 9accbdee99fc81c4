"""Audits: attacks on finished runs, and tests of mechanisms and of DP-SGD's kernels."""
