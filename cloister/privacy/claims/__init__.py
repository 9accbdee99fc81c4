"""Claims about the privacy of a run: values with figures and premises, as text and as JSON."""
