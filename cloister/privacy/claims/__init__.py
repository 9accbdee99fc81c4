"""What may be said about a run, to whom it applies, and in which words."""
