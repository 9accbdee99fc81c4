"""DP-SGD for Keras models: per-example gradients clipped, summed, noised (Abadi et al., 2016, arXiv:1607.00133).

    step          DpSgd: clipped sum, noise, division by the configured batch size, optimizer
    clipped_sums  the clipped sum of a batch of any size, in rows or in turn; the places of units in rows
    checks        refuses models and processors on which there is no guarantee
    in_turn       one unit after another in a compiled loop: any model
    in_rows       many units in one call of fixed shape: where `isolation` proves that a row is of one unit alone
    isolation, isolation_rules
                  which unit each tensor of a graph depends on, operation by operation
    capture       one backward pass that keeps what went into chosen layers, and the gradient of what came out
    forms         per-unit gradients of a layer: squared norms and weighted sums
    graphs        graphs are computed as they were traced, without state, each sum in the order of its terms
    losses        examples as a model takes them, their losses, the seeds of random layers
    batches       which units take part in a step, and how many places they are given; without TensorFlow
    local_steps   what a client takes and releases in a round; without TensorFlow
    rounding      by how much contributions are clipped shorter than S, so that roundings cannot take a sum past it
    exact_noise   the sum rounded to whole numbers, and exact noise on them; models that give their own gradient

Importing this package imports neither TensorFlow nor Keras.
"""
