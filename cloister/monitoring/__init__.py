"""Monitoring of a federation: its current problems as lines of text, as metrics, as webhook calls and as a page."""
