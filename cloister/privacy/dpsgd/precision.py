"""Whether the processor multiplies in single precision where it is told to."""

import os

import tensorflow as tf

from cloister.core.errors import ConfigError

COARSE_MODES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "TF_SET_ONEDNN_FPMATH_MODE")
"""Environment variables that let oneDNN compute products of float32 numbers in fewer bits."""


def use_single_precision() -> None:
    """Switch TensorFloat-32 off for this process: its products keep 11 of 24 bits, and no bound of ours holds then."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    refuse_coarse_precision()


def refuse_coarse_precision() -> None:
    """Refuse to compute where float32 products may be coarser than float32.

    Raises:
        ConfigError: TensorFloat-32 is on, or the environment lets oneDNN use a coarser format.
    """
    if tf.config.experimental.tensor_float_32_execution_enabled():
        raise ConfigError(
            "TensorFloat-32 is on, and clipping cannot be bounded in it; leave "
            "tf.config.experimental.enable_tensor_float_32_execution(False) as DpSgd sets it"
        )
    for name in COARSE_MODES:
        if os.environ.get(name, "strict").lower() not in ("", "strict"):
            raise ConfigError(
                f"environment variable {name} must be unset or STRICT for DP-SGD, got {os.environ[name]!r}"
            )
