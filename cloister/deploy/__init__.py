"""Deployment: start-up kits from one description of a federation, the operators' SuperLink, and warm nodes."""
