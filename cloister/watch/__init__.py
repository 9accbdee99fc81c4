"""Monitoring of a federation: its current problems as lines of text, as metrics, and as webhook calls."""
