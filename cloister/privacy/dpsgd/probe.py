"""Examples whose shapes and types say what a model takes. Nothing is computed of them."""

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import ConfigError
from cloister.core.tensors import Network

EXAMPLES = 3
"""Made-up examples: a size that other things in a model rarely have."""
Probe = tuple[NDArray, NDArray]
"""Made-up examples: x and y, `EXAMPLES` each."""


def made_up(model: Network) -> Probe:
    """Return examples for a classifier of one input: zeros.

    Raises:
        ConfigError: the model does not say what it takes; give a probe.
    """
    ends = (*(getattr(model, "inputs", None) or ()), *(getattr(model, "outputs", None) or ()))
    if len(ends) != 2 or any(None in end.shape[1:] for end in ends):
        raise ConfigError("probe must be given for a model without one input and one output of known shapes")
    (spec,), (output,) = model.inputs, model.outputs
    x = np.zeros((EXAMPLES, *spec.shape[1:]), spec.dtype)
    return x, np.zeros((EXAMPLES, *output.shape[1:-1]), np.int64)


def check_probe(probe: Probe) -> None:
    """Raises ConfigError unless x and y have `EXAMPLES` examples each."""
    if {len(array) for array in probe} != {EXAMPLES}:
        shapes = " and ".join(str(array.shape) for array in probe)
        raise ConfigError(f"probe must be x and y of {EXAMPLES} examples, got {shapes}")
