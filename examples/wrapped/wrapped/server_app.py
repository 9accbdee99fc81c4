"""The server: FedAdam of Flower's own, inside global differential privacy."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam

from cloister import GlobalDP

app = ServerApp()
INPUTS, CLASSES = 64, 10


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a linear classifier of digits, and say what is guaranteed."""
    strategy = FedAdam(eta=0.05)
    # The one line: around which strategy, how much noise there is, and what a client may contribute.
    private = GlobalDP(strategy, noise_multiplier=0.2, clipping_norm=1.0)
    initial = ArrayRecord([np.zeros((INPUTS, CLASSES), np.float32), np.zeros(CLASSES, np.float32)])
    result = private.start(grid, initial, num_rounds=int(context.run_config["num-rounds"]))

    claim = private.claim()
    print(f"claim: {claim.mechanism}, {claim.status}; {private.mechanism.parameters()}")
    weights, biases = result.arrays.to_numpy_ndarrays()
    print(f"the largest weight is {np.abs(weights).max():.3f}, the largest bias {np.abs(biases).max():.3f}")
