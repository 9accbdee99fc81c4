"""Rules of operations of PyTorch: which memory and which places are known to follow from a unit alone."""

import pytest

torch = pytest.importorskip("torch")

from torch.fx import Graph  # noqa: E402

from cloister.privacy.dpsgd.labels import Refused, Rows  # noqa: E402
from cloister.privacy.dpsgd.torch_isolation import labels  # noqa: E402
from cloister.privacy.dpsgd.torch_tracing import traced  # noqa: E402

pytestmark = pytest.mark.torch
aten = torch.ops.aten
X, WORDS, TABLE = torch.zeros(3, 4), torch.zeros((3, 4), dtype=torch.long), torch.zeros(5, 5)


def label_of(function):
    """Return the label of the last operation of a function of numbers and whole numbers of three units."""
    graph = traced(function, [X, WORDS]).graph
    numbers, words, *_, last, _ = graph.nodes
    return labels(graph, 3, {numbers: Rows(0), words: Rows(0)})[last]


torch.library.define("of_this_test::counted", "(Tensor x) -> Tensor")
OF_NO_UNIT = {
    "memory of other shape": (aten.resize.default, (torch.ones(2), [4])),
    "memory of a template": (aten.resize_as.default, (torch.ones(2), torch.ones(4))),
    "memory that is not filled": (aten.empty.memory_format, ([4],)),
    "memory of other strides": (aten.empty_strided.default, ([4], [1])),
    "memory of another tensor": (aten.set.source_Tensor, (torch.ones(2), torch.ones(4))),
    "a file": (aten.from_file.default, ("numbers", False, 4)),
    "an operation of ones own, with a state": (torch.ops.of_this_test.counted.default, (torch.ones(4),)),
    "a factory": (aten.full.default, ([4], 2.0)),
    "a rule": (aten.cumsum.default, (torch.ones(4), 0)),
    "a tag": (aten.exp.default, (torch.ones(4),)),
}


@pytest.mark.parametrize("name", OF_NO_UNIT)
def test_operations_of_no_unit_are_refused_unless_a_rule_or_a_tag_covers_them(name):
    """Else it might return memory in which numbers of a unit still are."""
    target, given = OF_NO_UNIT[name]
    graph = Graph()
    x = graph.placeholder("x")
    for number, each in enumerate(given):
        if isinstance(each, torch.Tensor):
            constant = graph.get_attr(f"constant_{number}")
            constant.meta["val"] = each
            given = (*given[:number], constant, *given[number + 1 :])
    made = graph.call_function(target, given)
    last = graph.call_function(aten.add.Tensor, (x, made))
    x.meta["val"], made.meta["val"], last.meta["val"] = X, torch.ones(4), X
    found = labels(graph, 3, {x: Rows(0)})
    if name in ("a factory", "a rule", "a tag"):
        assert (found[made], found[last]) == (None, Rows(0))
    else:
        assert isinstance(found[last], Refused) and "has no rule" in str(found[last].error)


def of_a_class(x, target):
    total = aten.nll_loss_forward(x, target, None, 0, -100)[1]
    return aten.nll_loss_backward(x[:, 0], x, target, None, 0, -100, total)


def of_pixels(x):
    largest, places = aten.max_pool2d_with_indices(x, [2, 1], [2, 1])
    return aten.max_pool2d_with_indices_backward(largest, x, [2, 1], [2, 1], [0, 0], [1, 1], False, places)


ROWS = {
    "several indices of a table": lambda x, words: TABLE[words[:, 0], words[:, 1]],
    "several indices, one the same for all": lambda x, words: TABLE[words, torch.arange(4)],
    "whole quotients": lambda x, words: words // 2 + words % 3 - torch.div(words, 5, rounding_mode="trunc"),
    "quotients": lambda x, words: words / words,
    "numbers at a place of ones own": lambda x, words: torch.zeros(3, 5).scatter(1, words[:, :1], x),
    "one number at a place of ones own": lambda x, words: torch.zeros(3, 5).scatter(1, words[:, :1], 1.0),
    "numbers at the same places": lambda x, words: aten.index_put(torch.zeros(3, 5), [None, torch.arange(4)], x),
    "the place of the largest": lambda x, words: x.gather(1, x.max(1, keepdim=True)[1]),
    "places in order": lambda x, words: x.gather(1, x.sort(1)[1][:, 1:3].clone()),
    "few places": lambda x, words: x.gather(1, x.topk(2, 1)[1]),
    "the place of the largest in a table": lambda x, words: TABLE[x.min(1)[1]],
    "a class of its own forward call": lambda x, words: of_a_class(x, words[:, 0]),
    "pixels of its own forward call": lambda x, words: of_pixels(x[:, None, :, None]),
    "a table by places": lambda x, words: torch.nn.functional.embedding(x.sort(1)[1], TABLE),
}
REFUSED = {
    "a quotient by a unit's number": lambda x, words: words // words,
    "a rest": lambda x, words: words % words,
    "a quotient by several numbers": lambda x, words: words // torch.tensor([1, 2, 3, 0]),
    "a quotient by zero": lambda x, words: words // 0,
    "a quotient by less than zero": lambda x, words: words // -1,  # the smallest whole number has no opposite
    "a whole power": lambda x, words: words**words,
    "places of other units": lambda x, words: x[words[:, 0].clamp(0, 2)],
    "numbers at places of other units": lambda x, words: torch.zeros(3, 4).index_put((torch.arange(2, -1, -1),), x),
    "numbers at places that a unit chooses": lambda x, words: aten.index_put(x, [None, words[0]], X),
    "numbers put along the axis of units": lambda x, words: torch.zeros(3, 4).scatter(0, words, x),
    "a slice put along the axis of units": lambda x, words: torch.slice_scatter(
        x.repeat(2, 1, 1).flatten(0, 1), x, 0, 1, 4
    ),
    "one row put along the axis of units": lambda x, words: torch.select_scatter(torch.zeros(3, 3, 4), x, 0, 1).sum(1),
    "rows that are added to others": lambda x, words: x.index_add(0, torch.tensor([2, 0, 1]), x),
    "a mask": lambda x, words: x[:, torch.ones(4, dtype=torch.bool)],
    "a place among more": lambda x, words: x[:, :3].gather(1, x.max(1, keepdim=True)[1]),
    "a place among more, in a table": lambda x, words: TABLE[:3][x.min(1)[1]],
    "a place further on": lambda x, words: x.gather(1, x.max(1, keepdim=True)[1] + 1),
    "a place in fewer bits": lambda x, words: x.gather(1, x.sort(1)[1].to(torch.int8).long()),
    "pixels of no pooling of its own": lambda x, words: aten.adaptive_max_pool3d_backward(
        x[:, None, None, None], x[:, None, None, None], words[:, None, None, None]
    ),
    "pixels of another pooling": lambda x, words: aten.max_pool2d_with_indices_backward(
        x[:, None, :, None],
        x[:, None, :, None],
        [1, 1],
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        aten.max_pool2d_with_indices(torch.cat([x, x], 1)[:, None, :, None], [2, 1], [2, 1])[1],
    ),
    "a class that no forward call has seen": lambda x, words: aten.nll_loss_backward(
        x[:, 0], x, words[:, 0], None, 0, -100, aten.nll_loss_forward(x, words[:, 1], None, 0, -100)[1]
    ),
    "a class among more": lambda x, words: aten.nll_loss_backward(
        x[:, 0], x[:, :3], words[:, 0], None, 0, -100, aten.nll_loss_forward(x, words[:, 0], None, 0, -100)[1]
    ),
    "a largest number": lambda x, words: TABLE[x.long().max(1)[0]],
    "a place in all rows": lambda x, words: x.gather(1, x.T.max(1)[1][None].expand(3, 4)),
}


@pytest.mark.parametrize("name", ROWS)
def test_places_that_follow_from_a_unit_alone_are_proved(name):
    assert label_of(ROWS[name]) == Rows(0)


@pytest.mark.parametrize("name", REFUSED)
def test_places_that_may_follow_from_another_unit_or_raise_are_refused(name):
    assert isinstance(label_of(REFUSED[name]), Refused)


@pytest.mark.parametrize("kind", ["max", "min", "sort", "topk"])
def test_places_are_valid_for_extreme_numbers(kind):
    """So no unit raises an exception by one."""
    x = torch.tensor([[float("nan"), float("inf"), 0.0, -0.0, 1e-45, float("-inf")]] * 2)
    x[1] = float("nan")
    found = {"max": x.max(1, True), "min": x.min(1, True), "sort": x.sort(1), "topk": x.topk(3, 1)}[kind][1]
    assert found.min() >= 0 and found.max() < 6
