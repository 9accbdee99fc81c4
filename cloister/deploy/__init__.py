"""Deployment: start-up kits for a described federation, the operators' SuperLink, and warm nodes."""
