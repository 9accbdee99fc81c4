"""The names of everything that travels in a message."""

ARRAYS = "arrays"
"""The record of a model's arrays, there and back."""
CONFIG = "config"
"""The record of settings that the server sends along."""
METRICS = "metrics"
"""The record of numbers that a client sends back."""

ROUND = "server-round"
SEED = "seed"
PROXIMAL_MU = "proximal-mu"
PROMISE = "privacy-multipliers"
"""Multipliers of the releases that a client's update will go into; absent: nothing is claimed."""

EXAMPLES = "num-examples"
TRAIN_LOSS = "train-loss"
