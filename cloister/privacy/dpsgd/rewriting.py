"""Graphs that are computed as they were traced.

TensorFlow rewrites a graph before it runs it (Grappler). For one, it gathers the terms of sums in the order of the
names that their operations happen to have. Rows that were traced alike are then rewritten apart: the last bits of a row
depend on its place, and on how many rows there are. Weights can be chosen by which such a bit turns a whole gradient
around.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

PASSES = ("arithmetic_optimization", "constant_folding", "remapping")
"""Those that put other arithmetic in the place of what was traced. The others put functions in line, leave out what is
not needed or there twice, and change nothing that is computed."""
_one_thread = threading.Lock()


@contextmanager
def as_traced() -> Iterator[None]:
    """Let the arithmetic of the graphs that are called in the block be as it was traced. One thread at a time.

    The options belong to the process: a graph that another thread runs for the first time meanwhile may be left as it
    is too.
    """
    options = tf.config.optimizer
    with _one_thread:
        before = options.get_experimental_options()
        options.set_experimental_options(dict.fromkeys(PASSES, False))
        try:
            yield
        finally:
            options.set_experimental_options({name: before.get(name, True) for name in PASSES})
