"""Proof that each row of a traced PyTorch graph depends on the data of one unit alone.

`labels` follows the units from a graph's inputs through its operations. The graph consists of operations of ATen, as
`make_fx` writes them down: all that PyTorch computes, forward and backward, in fixed shapes. `RULES` has a rule for an
operation. Elementwise operations are those that PyTorch tags so, and whose outputs have the shape of their inputs. Any
other operation is refused, even if none of its inputs depends on a unit. Such an operation may return
memory that still has numbers of a unit, the contents of a file, or a state of its own.

Rules describe what an operation computes. As in `isolation_rules`, that a kernel computes each row of a call of fixed
shape from this row alone is a premise. An index may raise an exception for integers of a unit's own data alone.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from cloister.privacy.dpsgd.labels import Label, NotIsolated, Refused, Rows, misfit
from cloister.privacy.dpsgd.torch_isolation_rules import (
    RULES,
    Rule,
    Step,
    arguments_of,
    elementwise,
    is_tagged,
    name_of,
    shape_of,
    tensors_in,
    unproved,
)


def refuse_effects(graph: Graph) -> None:
    """Refuse a graph that writes to a tensor, draws random numbers or has another effect.

    Args:
        graph: without operations that no output needs.

    Raises:
        Unproved: such an operation is in the graph.
    """
    called = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    for node in called:
        if not isinstance(node.target, torch._ops.OpOverload):
            raise unproved(node, "is no operation of ATen")
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise unproved(node, "draws random numbers")
    for node in called:
        if node.target._schema.is_mutable:
            raise unproved(node, "writes to a tensor")
        if not node.users:
            raise unproved(node, "has an effect")


def prove(graph: Graph, units: int, given: Mapping[Node, Label], targets: Sequence[Node]) -> dict[Node, Any]:
    """Prove that each row of each target depends on one unit alone, or on no unit.

    Args:
        graph: of a traced function.
        units: at least 2.
        given: labels of inputs; those of others are None.
        targets: with a unit in each entry of the first axis, in order. Those that depend on no unit have any shape.

    Returns:
        The labels, as `labels`.

    Raises:
        Mixes: an operation takes several units together.
        Unproved: no rule covers an operation, or a target has its units in another order.
    """
    refuse_effects(graph)
    found = labels(graph, units, given)
    for target in targets:
        label = found[target]
        if isinstance(label, Refused):
            raise label.error
        if label is not None and (label != Rows(0) or shape_of(target)[0] != units):
            raise unproved(target, f"does not give a row for each of {units} units in order: {label}")
    return found


def labels(graph: Graph, units: int, given: Mapping[Node, Label]) -> dict[Node, Any]:
    """Return the label of each tensor of a graph; of an operation with several outputs, a list of them.

    Args: as `prove`.
    """
    if units < 2:
        raise ValueError(f"units must be at least 2, got {units}")
    found: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            label: Any = given.get(node)
        elif node.op == "output":
            continue
        elif node.target is operator.getitem:
            several = found[node.args[0]]
            label = several[node.args[1]] if isinstance(several, list) else several
        else:
            label = _label(node, units, found)
        found[node] = label
        if isinstance(label, Rows) and (reason := misfit(label, shape_of(node), units)):
            found[node] = Refused(unproved(node, reason))
    return found


def _label(node: Node, units: int, found: Mapping[Node, Any]) -> Any:
    arguments = arguments_of(node)
    own = [found[each] for argument in arguments.values() for each in tensors_in(argument)]
    refused = [label for label in own if isinstance(label, Refused)]
    several = isinstance(node.meta["val"], (list, tuple))
    rule: Rule | None = RULES.get(name_of(node)) or (elementwise if is_tagged(node.target) else None)
    if rule is None and not refused:
        refused = [Refused(unproved(node, "has no rule"))]
    if rule is None or refused or all(label is None for label in own):
        label = refused[0] if refused else None
        return [label] * len(node.meta["val"]) if several else label
    step = Step(node, arguments, found, units)
    try:
        made: Any = rule(step)
        if several and not isinstance(made, list):
            return [made] * len(node.meta["val"])
        return made
    except NotIsolated as error:
        error.at(str(node.target), node.name)
        return [Refused(error)] * len(node.meta["val"]) if several else Refused(error)
