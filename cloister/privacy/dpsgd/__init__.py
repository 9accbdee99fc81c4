"""DP-SGD for Keras models: per-example gradients clipped, summed, noised (Abadi et al., 2016, arXiv:1607.00133).

    batches       which examples take part in a step, and in which fixed shapes they are computed; without TensorFlow
    checks        refuses what has no per-example gradient, and checks the fast way against the slow one on made-up data
    capture       one backward pass that keeps what went into each layer with weights, and the gradient of what came out
    rounding      by how much contributions are clipped shorter than S, so that roundings cannot take a sum past it
    precision     refuses processors that are set to coarser products than single precision
    parts         what a layer's per-unit gradients are asked for
    dense, convolution, vectorised
                  per-unit squared norms and weighted sums of one layer's gradients
    gradients     the layers put together: the clipped sum of a microbatch
    clipped_sums  that of a batch of any size, in one compiled shape
    running_sum   what calls give, added up so that roundings do not grow with a batch, without TensorFlow
    exact_noise   the sum rounded to whole numbers, and exact noise on them
    one_by_one    the same for models that give their own gradient, without TensorFlow
    step          DpSgd: clipped sum, noise, division by the configured batch size, optimizer
    central       training on examples that lie in one place

Importing this package imports neither TensorFlow nor Keras; every module but `batches` does.
"""
