"""Mechanisms: what bounds a contribution, what noises a sum, and the decorators that put both around a strategy."""
