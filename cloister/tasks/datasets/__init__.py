"""Benchmark data sets and their tasks."""
