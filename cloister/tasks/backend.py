"""Importing Keras without the page that TensorFlow writes about itself."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def import_keras() -> Any:
    """The `keras` module, on TensorFlow."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "keras" not in sys.modules:
        with _stderr_kept_back():
            import tensorflow  # noqa: F401
    import keras

    return keras


@contextmanager
def _stderr_kept_back() -> Iterator[None]:
    """Keep back what is written to standard error, and show it only if the block fails.

    TensorFlow's libraries write while they are loaded, before any setting could tell them not to.
    """
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(original, kept.read())
            raise
        finally:
            os.dup2(original, 2)
            os.close(original)
