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

OFF = "disable_meta_optimizer"
"""The option under which nothing is rewritten."""
_one_thread = threading.Lock()


@contextmanager
def as_traced() -> Iterator[None]:
    """Rewrite no graph that is called in the block. Other threads wait for their own such blocks.

    The option belongs to the process: a graph that another thread runs for the first time meanwhile may be left as it
    is too, and takes a little longer.
    """
    options = tf.config.optimizer
    with _one_thread:
        before = options.get_experimental_options().get(OFF, False)
        options.set_experimental_options({OFF: True})
        try:
            yield
        finally:
            options.set_experimental_options({OFF: before})
