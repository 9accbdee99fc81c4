"""Flower strategies that place a privacy mechanism around another Flower strategy."""
