"""Cloister: private federated learning on Flower that people can deploy."""

__version__ = "0.1.0"
