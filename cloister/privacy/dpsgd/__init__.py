"""DP-SGD for Keras models: per-example gradients clipped, summed, noised (Abadi et al., 2016, arXiv:1607.00133).

    step          DpSgd: clipped sum, noise, division by the configured batch size, optimizer
    clipped_sums  the clipped sum of a batch of any size, in rows or in turn; the places of units in rows
    checks        refuses what cannot be trained, and says which of the two it is
    in_turn       one unit after another in a compiled loop: any model
    in_rows       many units in one call of fixed shape: where `isolation` proves that a row is of one unit alone
    isolation, isolation_rules
                  which unit each tensor of a graph depends on, operation by operation
    gradients     the layers of a model put together: the clipped sum of a call in rows
    capture       one backward pass that keeps what went into each layer with weights, and the gradient of what came out
    parts         what a layer's per-unit gradients are asked for
    dense, convolution, embedding, normalization
                  per-unit squared norms and weighted sums of one layer's gradients
    reductions, rewriting
                  equal calls give equal results
    draws         places and the seeds of random layers, from the operating system
    batches       which units take part in a step, and how many places they are given; without TensorFlow
    rounding      by how much contributions are clipped shorter than S, so that roundings cannot take a sum past it
    precision     refuses processors that are set to coarser products than single precision
    exact_noise   the sum rounded to whole numbers, and exact noise on them
    one_by_one    the same for models that give their own gradient, without TensorFlow
    central       training on examples that lie in one place

Importing this package imports neither TensorFlow nor Keras; every module but `batches` does.
"""
