"""Trainers by name: how a client turns a model and its examples into an update."""
