"""Training of models on examples: by a client in a round, or by the server before the first."""
