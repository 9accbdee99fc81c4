"""Import of Keras without TensorFlow's startup messages."""

import os
import sys
import tempfile
from types import ModuleType


def import_keras() -> ModuleType:
    """Import and return `keras` with the TensorFlow backend."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "keras" not in sys.modules:
        # TensorFlow's libraries print while they are loaded, before a setting takes effect. Standard error is captured,
        # and printed only if the import fails.
        sys.stderr.flush()
        original = os.dup(2)
        with tempfile.TemporaryFile() as kept:
            os.dup2(kept.fileno(), 2)
            try:
                import tensorflow  # noqa: F401
            except BaseException:
                kept.seek(0)
                os.write(original, kept.read())
                raise
            finally:
                os.dup2(original, 2)
                os.close(original)
    import keras

    return keras
