"""DP-SGD for Keras and PyTorch models (Abadi et al., 2016, arXiv:1607.00133).

    descent       a step: clipped sum, noise, division by the configured batch size, optimizer; without TensorFlow
    step          DpSgd: the same on Keras models
    clipped_sums  the clipped sum of a batch of any size, in rows or in turn; the places of units in rows; without
                  TensorFlow
    nested        examples of several arrays; without TensorFlow
    checks        refuses models and processors without a guarantee
    in_turn       one unit after another in a compiled loop: any model
    in_rows       many units in one call of fixed shape, if `isolation` proves that each row depends on one unit alone
    isolation, isolation_rules
                  proof of the unit on which each tensor of a graph depends, operation by operation
    tracing       losses and seeds of a traced call, and exact execution of graphs without state
    uses, forms   the uses of each weight in a graph, and norms and sums of the gradients of units by these uses
    batches       draws of the units of a step, their examples, and their places in a call; without TensorFlow
    local_steps   a client's steps in a round, and their event; without TensorFlow
    noise         the margin below S for roundings, integer rounding of the sum with exact noise, and the noised sum of
                  models that compute their own gradient; without TensorFlow
    torch_step    TorchDpSgd: the same on PyTorch modules
    torch_checks  refuses modules and settings without a guarantee
    torch_in_turn one unit after another: any module
    torch_in_rows many units in calls of fixed shape, if `torch_isolation` proves that rows depend on one unit each
    torch_tracing the graph of a module's losses
    torch_uses    the graph of the gradients of its rows; `torch_forms`: their norms and sums
    torch_calls   calls of a module for one unit, which leave no trace for the next

Importing this package imports neither TensorFlow, Keras nor PyTorch.
"""
