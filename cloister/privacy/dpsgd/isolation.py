"""Proof that each row of a traced graph depends on the data of one unit alone.

A unit's gradient must depend on that unit alone. `prove` follows the units from a graph's inputs through each
operation and each function that the graph calls. `isolation_rules` has one rule for each type of operation. Operations
without a rule, such as branches and loops over units, are refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

import tensorflow as tf

from cloister.privacy.dpsgd.isolation_rules import GUARDS, RAISING, StaticValues, Step, has_rule, outputs
from cloister.privacy.dpsgd.labels import Label, NotIsolated, Refused, Rows, Unproved, misfit
from cloister.privacy.dpsgd.tracing import UNORDERED, may_keep, with_functions
from cloister.utils.arrays import Tensor

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
CONTROL = ("Case", "If", "StatelessCase", "StatelessIf", "StatelessWhile", "While")
INPUTS = ("Placeholder", "Const")
"""Types of a function's inputs: a small outer constant is both copied into a function and passed to it."""
MOVES = ("Cast", "ExpandDims", "Identity", "Reshape", "Slice", "Squeeze", "StridedSlice")
"""Types that pass on the integers of their input."""
ONE_BY_ONE = ("Add", "AddV2", "GreaterEqual", "Less", "Maximum", "Minimum", "Select", "SelectV2", "Sub")
"""Types that compute an integer from each input entry and a common scalar, such as for indices below zero."""


def prove(graph: tf.Graph, units: int, rows: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Prove that each row of each target depends on one unit alone, or on no unit.

    Args:
        graph: of a traced function.
        units: at least 2.
        rows: placeholders of the graph whose first axis holds the examples, unit by unit, each unit with the same
            number. All other inputs must be independent of units.
        targets: tensors of the graph. The first axis of each is divided evenly among the units, in their order. A
            target that depends on no unit may have any shape.

    Raises:
        Mixes: an operation takes several units together.
        Unproved: no rule covers an operation, the graph may keep data between calls, or a target has its units along
            another axis or in another order.
    """
    given: dict[int, Label] = {}
    for row in rows:
        if not row.shape.rank or not row.shape[0] or row.shape[0] % units:
            raise _unproved(row.op, f"does not hold {units} units along its first axis: {row.shape}")
        given[id(row)] = Rows(0, row.shape[0] // units)
    for target, label in zip(targets, labels(graph, units, given, targets), strict=True):
        if label is None:
            continue
        if not isinstance(label, Rows) or label.axis != 0 or target.shape[0] != units * label.inner:
            raise _unproved(target.op, f"does not give rows of {units} units in order: {label}")


def labels(graph: tf.Graph, units: int, given: Mapping[int, Label], targets: Sequence[Tensor]) -> list[Label]:
    """Return the labels of some tensors of a graph, by the units on which they depend.

    Args:
        graph, units: as in `prove`.
        given: the label of each placeholder that depends on units, by the `id` of the placeholder's tensor.
        targets: tensors of the graph.

    Raises:
        Mixes, Unproved: as in `prove`.
        ValueError: fewer than two units, or a label of a tensor that is not a placeholder of the graph.
    """
    if units < 2:
        raise ValueError(f"units must be at least 2, got {units}")
    for own in with_functions(graph):
        for operation in own.get_operations():
            # A graph with effects computes them even if no target needs them.
            if may_keep(operation):
                raise _unproved(operation, "may write, read a file, call Python or keep a state")
            if operation.type in UNORDERED:
                raise _unproved(operation, "adds up in an order that follows from timing")
    inputs = [operation.outputs[0] for operation in graph.get_operations() if operation.type == "Placeholder"]
    found = {tensor.name: given[id(tensor)] for tensor in inputs if id(tensor) in given}
    if len(found) != len(given):
        raise ValueError("labels are given for tensors that are not placeholders of the graph")
    made = _labels(graph, units, found, targets, frozenset(found))
    for label in made:
        if isinstance(label, Refused):
            raise label.error
    return made


def _labels(
    graph: tf.Graph,
    units: int,
    given: Mapping[str, Label],
    targets: Sequence[Tensor],
    own: frozenset[str] = frozenset(),
) -> list[Label]:
    """Return labels of one graph from those of placeholders, of which `own` hold the units' original data."""
    values, found = StaticValues(), dict(given)
    for operation in _in_order(graph, targets):
        kind, before = operation.type, tuple(found[tensor.name] for tensor in operation.inputs)
        if kind in INPUTS:
            made: Sequence[Label] = [found.get(operation.outputs[0].name)]
        elif kind in CALLS:
            function = graph._get_function(operation.get_attr("f").name).graph
            if len(function.inputs) != len(before) or any(tensor.op.type not in INPUTS for tensor in function.inputs):
                raise _unproved(operation, "calls a function with other inputs than its own")
            inner = {tensor.name: label for tensor, label in zip(function.inputs, before, strict=True)}
            made = _labels(function, units, inner, function.outputs)
        else:
            _refuse_raising(operation, found, own)
            depends = any(label is not None for label in before)
            if depends and kind in CONTROL:
                raise _unproved(operation, "branches or loops with units")
            if depends and kind in GUARDS:
                raise _unproved(operation, "raises an exception that depends on a unit")
            if depends and not has_rule(kind):
                # At once, and not only if a target needs it: it is computed, and may raise an exception.
                raise _unproved(operation, "has no rule, and depends on units")
            try:
                made = outputs(Step(operation, before, units, values))
            except NotIsolated as error:
                made = [Refused(error.at(kind, operation.name))] * len(operation.outputs)
        if len(made) != len(operation.outputs):
            raise _unproved(operation, "gives another number of outputs than its rule")
        for tensor, label in zip(operation.outputs, made, strict=True):
            reason = misfit(label, tensor.shape.as_list() if tensor.shape.rank is not None else None, units)
            if isinstance(label, Rows) and tensor.dtype in (tf.variant, tf.resource):
                reason = "gives a list of tensors, or a handle"
            found[tensor.name] = Refused(_unproved(operation, reason)) if reason else label
    return [found[tensor.name] for tensor in targets]


def _unproved(operation: tf.Operation, reason: str) -> Unproved:
    return Unproved(reason).at(operation.type, operation.name)


def _refuse_raising(operation: tf.Operation, found: Mapping[str, Label], own: frozenset[str]) -> None:
    """Refuse an exception that depends on more than the integers of a unit's own data.

    Otherwise a unit could raise it at one place or with some random numbers, but its copy in an empty place might not.
    """
    if operation.type not in RAISING:
        return
    decides = operation.inputs[RAISING[operation.type]]
    if decides.dtype.is_integer and found[decides.name] is not None and not _is_held(decides, found, own):
        raise _unproved(operation, "may raise an exception for numbers that were computed or drawn")


def _is_held(tensor: Tensor, found: Mapping[str, Label], own: frozenset[str]) -> bool:
    """Return whether a tensor is computed from a unit's own integers alone, in the same way at every place."""
    operation = tensor.op
    if not isinstance(found[tensor.name], Rows) or not (tensor.dtype.is_integer or tensor.dtype.is_bool):
        return False
    if operation.type == "Placeholder":
        return tensor.name in own
    if operation.type not in MOVES + ONE_BY_ONE:
        return False
    others = [each for each in operation.inputs if found[each.name] is None]
    if operation.type in ONE_BY_ONE and any(each.shape.rank != 0 for each in others):
        return False
    return all(_is_held(each, found, own) for each in operation.inputs if found[each.name] is not None)


def _in_order(graph: tf.Graph, targets: Sequence[Tensor]) -> Iterator[tf.Operation]:
    """Yield each operation that a call computes, after all of its dependencies.

    Stateful operations are computed even if no target needs them: one may raise an exception.
    """
    todo = [tensor.op for tensor in targets]
    todo += [operation for operation in graph.get_operations() if operation.op_def.is_stateful]
    before: dict[tf.Operation, list[tf.Operation]] = {}
    while todo:
        operation = todo.pop()
        if operation not in before:
            before[operation] = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
            todo += before[operation]
    try:
        yield from TopologicalSorter(before).static_order()
    except CycleError as error:
        raise _unproved(error.args[1][0], "is part of a cycle") from error
