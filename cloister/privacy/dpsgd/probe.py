"""Made-up examples that a model is tried with."""

import keras
import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import ConfigError
from cloister.core.tensors import Network

EXAMPLES = 3
"""Made-up examples: a size that other things in a model rarely have."""
Probe = tuple[NDArray, NDArray]
"""Made-up examples: x and y, `EXAMPLES` each."""


def made_up(model: Network) -> Probe:
    """Examples for a classifier of one input: positive numbers, as of images, and labels among its outputs.

    Raises:
        ConfigError: the model does not say what it takes; give a probe.
    """
    ends = (*(getattr(model, "inputs", None) or ()), *(getattr(model, "outputs", None) or ()))
    if len(ends) != 2 or any(None in end.shape[1:] for end in ends):
        raise ConfigError("probe must be given for a model without one input and one output of known shapes")
    (spec,), (output,), rng = model.inputs, model.outputs, np.random.default_rng(0)
    shape = (EXAMPLES, *spec.shape[1:])
    y = rng.integers(0, output.shape[-1], (EXAMPLES, *output.shape[1:-1]))
    if "int" not in spec.dtype:
        # Above 0: a zero would hide the weights that it meets.
        return rng.uniform(0.05, 1.0, shape).astype(spec.dtype), y
    sizes = [layer.input_dim for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding)]
    return rng.integers(0, min(sizes, default=2), shape).astype(spec.dtype), y


def check_probe(probe: Probe) -> None:
    """Raises ConfigError unless x and y have `EXAMPLES` examples each."""
    if {len(array) for array in probe} != {EXAMPLES}:
        shapes = " and ".join(str(array.shape) for array in probe)
        raise ConfigError(f"probe must be x and y of {EXAMPLES} examples, got {shapes}")
