"""Import of Keras without TensorFlow's startup messages."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def import_keras() -> Any:
    """Import and return `keras` with the TensorFlow backend."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "keras" not in sys.modules:
        with _stderr_kept_back():
            import tensorflow  # noqa: F401
    import keras

    return keras


@contextmanager
def _stderr_kept_back() -> Iterator[None]:
    """Capture standard error, and print it only if the block fails.

    TensorFlow's libraries print while they are loaded, before a setting takes effect.
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
