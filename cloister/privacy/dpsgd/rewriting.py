"""Graphs that are computed as they were traced.

TensorFlow rewrites a graph before it runs it (Grappler). It gathers the terms of sums in the order of the names that
their operations happen to have. In large graphs it also adds terms up in the order in which they become known. So what
was traced alike comes out differently: by its place in a batch, by how many examples there are, or from one call to the
next. Weights can be chosen by which the last bit of such a sum changes the direction of a whole gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context

PASSES = ("arithmetic_optimization", "constant_folding", "remapping")
"""Those that put other arithmetic in the place of what was traced. The memory optimizer does so too."""


@contextmanager
def as_traced() -> Iterator[None]:
    """Leave the arithmetic of the graphs that this thread calls in the block as it was traced.

    `tf.config.optimizer` has no option for the memory optimizer, and those that it has belong to the process. So the
    thread's own options are set, by a part of TensorFlow that is not public: without it there is no DP-SGD.
    """
    own = context.context()
    before = own.function_call_options
    config = config_pb2.ConfigProto.FromString(before.config_proto_serialized)
    options, kinds = config.graph_options.rewrite_options, rewriter_config_pb2.RewriterConfig
    for name in PASSES:
        setattr(options, name, kinds.OFF)
    options.memory_optimization = kinds.NO_MEM_OPT
    own.function_call_options = context.FunctionCallOptions(executor_type=before.executor_type, config_proto=config)
    try:
        yield
    finally:
        own.function_call_options = before
