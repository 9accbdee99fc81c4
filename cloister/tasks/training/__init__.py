"""Trainers by name: how a model is trained on examples, by a client in a round or by the server before the first."""
