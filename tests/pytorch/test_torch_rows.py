"""DP-SGD of PyTorch modules in rows: as in turn, each row from its own unit alone, and in turn what is not proved."""

import random
import re
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from cloister.audits.torch_kernels import MODELS, Residual, of_classes  # noqa: E402
from cloister.privacy.dpsgd.batches import Draws  # noqa: E402
from cloister.privacy.dpsgd.clipped_sums import ClippedSums  # noqa: E402
from cloister.privacy.dpsgd.labels import Mixes, NotIsolated, Refused, Rows, Unproved  # noqa: E402
from cloister.privacy.dpsgd.noise import ROUNDED, SMALLEST_FACTOR  # noqa: E402
from cloister.privacy.dpsgd.torch_forms import of_positions, squares  # noqa: E402
from cloister.privacy.dpsgd.torch_in_rows import USUAL, TorchInRows  # noqa: E402
from cloister.privacy.dpsgd.torch_in_turn import TorchInTurn  # noqa: E402
from cloister.privacy.dpsgd.torch_isolation import labels  # noqa: E402
from cloister.privacy.dpsgd.torch_step import TorchDpSgd  # noqa: E402
from cloister.privacy.dpsgd.torch_tracing import traced  # noqa: E402

pytestmark = pytest.mark.torch
S = 0.5
B = 8


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(5)


def batch(shape, size=9, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((size, *shape)).astype(np.float32), rng.integers(0, 3, size)


def made(module, shape=(6,), loss=of_classes, cap=1, probe=None):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    options = {"batch_size": B, "noise_multiplier": 1.0, "clipping_norm": S, "loss": loss, "optimizer": optimizer}
    step = TorchDpSgd(module, probe=probe or batch(shape, 3), group_cap=cap, **options)
    step.reseed(0)
    return step


def norm(arrays):
    return float(np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in arrays)))


MODULES = {
    name: (model.build, model.shape)
    for name, model in MODELS.items()
    if model.loss is of_classes and not model.words and model.cap == 1
}


@cache
def made_once(name, cap):
    """Tracing takes most of the time of these tests."""
    build, shape = MODULES[name]
    return made(build(), shape, cap=cap)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(5, 6, padding_idx=2), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.table(x).mean(1))


def test_a_table_of_words():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 5, (9, 4)), rng.integers(0, 3, 9)
    module = Words()
    step = made(module, probe=(x[:3], y[:3]))
    assert step.method == "rows" and step._clipped_sums.engine.kernels["table.weight"] == "embedding"
    turn = ClippedSums(TorchInTurn(module, of_classes, step.probe, B, 1), step._like, step.probe, B, 1)
    for bound in (1e-3, 1e6):
        one, two = (each.of(x, y, bound).sums for each in (step._clipped_sums, turn))
        assert norm([a - b for a, b in zip(one, two, strict=True)]) < 5e-4 * norm(two)


def test_dropout_draws_for_each_row_of_each_call():
    """With a weight of ones, the sum of a unit's gradient counts the inputs that were kept."""
    module = nn.Sequential(nn.Dropout(0.25), nn.Linear(400, 1, bias=False))
    x, y = np.ones((9, 400), np.float32), np.zeros(9, np.int64)
    step = made(module, loss=lambda y, z: z[:, 0], probe=(x[:3], y[:3]))
    assert step.method == "rows"

    def kept(seed):
        step.reseed(seed)
        return [step.clipped_sum(x[:n], y[:n], 1e6).sums[0][0] * 0.75 for n in (1, 9)]

    (one, nine), again, other = kept(1), kept(1), kept(2)
    assert np.array_equal(one, again[0]) and np.array_equal(nine, again[1]) and not np.array_equal(nine, other[1])
    np.testing.assert_allclose(np.unique(np.round(one, 3)), [0, 1])
    # Of nine units with the same mask, the numbers would be 0 and 9 alone.
    assert abs(nine.mean() - 6.75) < 0.3 and abs(nine.var() - 9 * 0.1875) < 0.4


every_module = pytest.mark.parametrize("name", MODULES)


@every_module
@pytest.mark.parametrize("cap", [1, 3])
def test_the_sum_is_that_of_units_in_turn(name, cap):
    step, (x, y) = made_once(name, cap), batch(MODULES[name][1])
    step.reseed(0)
    groups = np.array([0, 0, 1, 2, 2, 2, 3, 4, 4]) if cap > 1 else None
    turn = TorchInTurn(step.module, of_classes, step.probe, B, cap)
    other = ClippedSums(turn, step._like, step.probe, B, cap)
    assert (step.method, step.why_in_turn) == ("rows", "")
    for bound in (1e-3, S, 1e6):
        one, two = (each.of(x, y, bound, groups) for each in (step._clipped_sums, other))
        assert norm([a - b for a, b in zip(one.sums, two.sums, strict=True)]) < 5e-4 * norm(two.sums)
        assert (one.examples, one.clipped, one.non_finite) == (two.examples, two.clipped, two.non_finite)


@every_module
def test_neighbours_change_no_bit_of_what_is_held_of_a_unit(name):
    engine = made_once(name, 1)._clipped_sums.engine
    rows = engine.at_once
    x, y = batch(MODULES[name][1], rows)
    seed = engine.seeds(Draws(0))[0]

    def held(values, neighbours):
        given = neighbours.copy()
        given[3] = x[3]
        with torch.no_grad():
            return [each[3].numpy() for each in engine.held(values, given, y, np.ones((rows, 1), bool), seed)]

    for scale in (1e-38, 1e-10, 1.0, 1e10, 1e38):
        values = [(own * scale).clamp(-3e38, 3e38) for own in engine.values()]
        before = held(values, x)
        for extreme in (np.inf, np.nan, 1e38, -1e38, 1e-42, 0.0):
            after = held(values, np.full_like(x, extreme))
            assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", ["outer", "gram", "whole"])
def test_a_contribution_has_the_bound_for_its_norm_whatever_its_size(kind):
    """Also where a scaled delta is a denormal, whose rounding an input of 1e38 would show."""
    positions, size = {"outer": (1, 4), "gram": (2, 64), "whole": (9, 4)}[kind]
    rng, longest = np.random.default_rng(0), 0.0
    for scale in (-38, -20, 0, 20, 37):
        inputs = torch.from_numpy((rng.standard_normal((40, positions, size)) * 10.0**scale).astype(np.float32))
        deltas = (rng.standard_normal((40, positions, size)) * 10.0 ** rng.uniform(-44, 0, (40, 1, 1))).astype("f")
        form, held, squared = of_positions(inputs, torch.from_numpy(deltas), False)
        assert form.kernel == kind
        for bound in (1e-12, 1e-7, 1.0):
            norms = squared.sqrt().clamp(min=bound) * (1 + 2.0**-40)
            for unit in range(40):
                factor = bound / norms[unit : unit + 1]
                if factor < SMALLEST_FACTOR:
                    continue  # such a unit counts as zero
                summed = form.summed([each[unit : unit + 1] for each in held], factor)
                longest = max(longest, float(summed.double().norm()) / bound)
    assert 0.9 < longest < 1 + 1e-5


@pytest.mark.parametrize("scale", [1e-37, 1.0, 1e37])
def test_squared_norms_are_overstated_and_by_their_margin_at_most(scale):
    for size in (1, 7, 1000, 20000):
        rows = torch.from_numpy((np.random.default_rng(size).standard_normal((3, size)) * scale).astype(np.float32))
        for row, found in zip(rows, squares(rows), strict=True):
            exact = sum(Fraction(float(each)) ** 2 for each in row)
            assert exact <= Fraction(float(found)) <= exact * (1 + 2 * Fraction(ROUNDED) * (size + 2))


@pytest.mark.parametrize("flushes", [False, True])
def test_a_contribution_has_the_bound_for_its_norm_if_one_thread_alone_flushes_denormals(flushes):
    inputs, deltas = torch.full((2, 1, 600), 1e-39), torch.full((2, 1, 600), 3e38)
    try:
        if not torch.set_flush_denormal(flushes):
            pytest.skip("this processor has no such flag")
        form, held, squared = of_positions(inputs, deltas, False)
        torch.set_flush_denormal(False)
        summed = form.summed(held, 1 / squared.sqrt().clamp(min=1.0))
    finally:
        torch.set_flush_denormal(False)
    assert form.kernel == "outer" and float(summed.double().norm()) <= 2.001


def test_mixed_precision_around_a_step_changes_no_bit():
    step, (x, y) = made_once("dense", 1), batch((6,))
    step.reseed(0)
    expected = step.clipped_sum(x, y, S).sums
    step.reseed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = step.clipped_sum(x, y, S).sums
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_gradients_of_few_bits_have_no_form():
    with pytest.raises(ValueError, match="bfloat16"):
        of_positions(torch.ones(2, 1, 4), torch.ones(2, 1, 4, dtype=torch.bfloat16), False)


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


COUPLED = {
    "a mean over the batch": lambda x: x - 0.1 * x.mean(0, keepdim=True),
    "a sum": lambda x: x / x.sum(),
    "softmax over rows": lambda x: x.softmax(0),
    "a cumulative sum": lambda x: x.cumsum(0),
    "a roll": lambda x: x.roll(1, 0),
    "a flip": lambda x: x.flip(0),
    "a slice": lambda x: x[:1].expand(len(x), -1) + x,
    "products of rows": lambda x: x @ (x.T @ x),
    "a sorted batch": lambda x: x.sort(0).values,
    "a largest row": lambda x: x - x.amax(0),
    "a view across rows": lambda x: x.view(2, -1).softmax(1).view(x.shape),
    "a norm of all": lambda x: nn.functional.layer_norm(x, tuple(x.shape)),
    "pooled rows": lambda x: nn.functional.avg_pool2d(x[None, None], (3, 1), 1, (1, 0))[0, 0],
    "attention over rows": lambda x: nn.functional.scaled_dot_product_attention(*[x[None]] * 3)[0],
    "products of all with one row": lambda x: x * (x[:, None] @ x[:1].T.expand(len(x), -1, -1))[:, 0],
    "a transposed product": lambda x: (x.T @ torch.ones(len(x), len(x))).T + x,
}


@pytest.mark.parametrize("what", COUPLED)
def test_a_module_that_couples_rows_is_refused_to_them(what):
    module = nn.Sequential(nn.Linear(6, 8), Calls(COUPLED[what]), nn.Linear(8, 3))
    with pytest.raises((Mixes, Unproved)):
        TorchInRows(module, of_classes, batch((6,), 3), B, 1)


def test_a_loss_that_couples_rows_is_refused_to_them():
    with pytest.raises(NotIsolated):
        TorchInRows(nn.Linear(6, 3), lambda y, z: of_classes(y, z - z.mean(0)), batch((6,), 3), B, 1)


def test_a_loss_of_several_labels_is_computed_in_rows():
    """PyTorch computes it in memory that is not initialized at first."""

    def loss(y, outputs):
        labels = nn.functional.one_hot(y, 3).float()
        return nn.functional.binary_cross_entropy_with_logits(outputs, labels, reduction="none").mean(1)

    module, (x, y) = nn.Linear(6, 3), batch((6,))
    step = made(module, (6,), loss)
    found = step.clipped_sum(x, y, 1e6).sums
    total = loss(torch.from_numpy(y), module(torch.from_numpy(x))).sum()
    expected = [own.numpy() for own in torch.autograd.grad(total, list(module.parameters()))]
    assert (step.method, step.why_in_turn) == ("rows", "")
    assert norm([a - b for a, b in zip(found, expected, strict=True)]) < 1e-5 * norm(expected)


class Straight(torch.autograd.Function):
    """Has a gradient that is not that of its operations."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def no_gradient(x):
    with torch.no_grad():
        scale = x.sigmoid()
    return x * scale


class Adds(nn.Module):
    """Keeps a sum of what it has seen, in a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.seen = [torch.zeros(8)]

    def forward(self, x):
        self.seen[0].add_(x.detach().sum(0))
        return x


class Listed(nn.Module):
    """Reaches a frozen parameter by a list, in which no new numbers can take its place."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8).requires_grad_(False)
        self.weights = [self.inner.weight]

    def forward(self, x):
        return x @ self.weights[0]


IN_TURN = {
    "aten._linalg_det.default has no rule": lambda x: x + torch.linalg.det(x[:, :4].view(-1, 2, 2))[:, None],
    r"Calls\) fails with several examples: .*DataDependent": lambda x: x * 2 if float(x[0, 0].detach()) > 0 else x,
    "aten.rand_like.default draws random numbers": lambda x: x * torch.rand_like(x),
    r"Calls\) fails with several examples": Straight.apply,
    "differ from those of plain autograd": no_gradient,
    "in float32 on a processor": lambda x: x,
    r"Adds\) fails with several examples": Adds(),
    "reaches a parameter or a buffer by more than the attribute": Listed(),
    "draws numbers by Python": lambda x: x if random.random() < 2 else 2 * x,
    "draws numbers by Python or NumPy": lambda x: x if np.random.random() < 2 else 2 * x,
    "may raise an exception for numbers that were computed": lambda x: x + x.gather(1, (x[:, :1] > 0).long()),
}


@pytest.mark.parametrize("reason", IN_TURN)
def test_a_module_without_a_proof_is_computed_in_turn_and_says_why(reason):
    inner = IN_TURN[reason] if isinstance(IN_TURN[reason], nn.Module) else Calls(IN_TURN[reason])
    module = nn.Sequential(nn.Linear(6, 8), inner, nn.Linear(8, 3))
    shape, (x, y) = (6,), batch((6,))
    if "float32" in reason:
        module, x = nn.Sequential(Calls(lambda x: x.double()), module.double()), x
    step = made(module, shape)
    assert step.method == "in turn" and re.search(reason, step.why_in_turn), step.why_in_turn
    assert norm(step.clipped_sum(x, y, S).sums) > 0


class OfAll(nn.Module):
    """Multiplies each example by all rows of numbers that no example makes."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x):
        return x @ self.function(torch.linspace(-1, 1, 4 * USUAL).view(USUAL, 4), self.weight, self.bias).T


FALSE_ROWS = {
    "products": lambda numbers, weight, bias: numbers @ weight,
    "products and sums": lambda numbers, weight, bias: torch.addmm(bias, numbers, weight),
    "copies": lambda numbers, weight, bias: weight[:1].expand(USUAL, 6),
}


@pytest.mark.parametrize("what", FALSE_ROWS)
def test_as_many_rows_as_examples_are_not_taken_for_rows_of_examples(what):
    """In a round of as many rows, their gradients would be added to those of the units there."""
    module, (x, y) = nn.Sequential(OfAll(FALSE_ROWS[what]), nn.Linear(USUAL, 3)), batch((6,))
    with pytest.raises(NotIsolated):
        TorchInRows(module, of_classes, batch((6,), 3), B, 1)
    step = made(module)
    for one, label in zip(x, y, strict=True):
        assert 0.99e-3 < norm(step.clipped_sum(one[None], label[None], 1e-3).sums) <= 1e-3


def test_tied_layers_are_computed_in_turn_or_with_one_norm():
    """Else the norm of a sum of two gradients would be that of each."""
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    module = nn.Sequential(first, second)
    step, (x, y) = made(module, (6,), loss=lambda y, z: z.square().sum(1)), batch((6,))
    for one, label in zip(x, y, strict=True):
        assert 0.99e-3 < norm(step.clipped_sum(one[None], label[None], 1e-3).sums) <= 1e-3


def test_rows_leave_nothing_in_the_module_and_use_its_present_weights():
    module = nn.Sequential(Residual(nn.Linear(6, 6)), nn.Linear(6, 3))
    step, (x, y) = made(module, (6,)), batch((6,))
    with torch.no_grad():
        for own in module.parameters():
            own.mul_(3.0)
    found = step.clipped_sum(x, y, 1e6).sums
    loss = of_classes(torch.from_numpy(y), module(torch.from_numpy(x))).sum()
    expected = [own.numpy() for own in torch.autograd.grad(loss, list(module.parameters()))]
    assert norm([a - b for a, b in zip(found, expected, strict=True)]) < 1e-5 * norm(expected)
    assert all(own.grad is None and not own.is_meta for own in module.parameters())


def test_a_unit_that_raises_contributes_zero_and_the_others_keep_their_bits():
    step, (x, y) = made(nn.Linear(6, 3), (6,)), batch((6,))
    bad = y.copy()
    bad[4] = 7
    found = step.clipped_sum(x, bad, S)
    assert (found.examples, found.non_finite) == (9, 1)
    step.reseed(0)
    x[4] = np.nan
    other = step.clipped_sum(x, y, S)
    assert norm([a - b for a, b in zip(found.sums, other.sums, strict=True)]) < 1e-6 * norm(other.sums)


def test_a_graph_with_an_effect_is_refused():
    with pytest.raises(Unproved, match="draws random numbers"):
        traced(lambda x: x + torch.rand(3), [torch.zeros(3)])
    with pytest.raises(Unproved, match="writes to a tensor"):
        traced(lambda x: x.add_(1.0), [torch.zeros(3)])


def label_of(function, shape, label):
    """Return the label of the last operation of a function of one tensor with three units."""
    graph = traced(function, [torch.zeros(shape)]).graph
    given, *_, last, _ = graph.nodes
    return labels(graph, 3, {given: label})[last]


def test_no_axes_to_squeeze_leave_all_in_place():
    assert label_of(lambda x: torch.ops.aten.squeeze.dims(x, []), (1, 6), Rows(1)) == Rows(1)
    assert label_of(lambda x: torch.ops.aten.squeeze.dims(x, [0, -1]), (1, 6), Rows(1)) == Rows(0)


@pytest.mark.parametrize("sizes", [(1, 24, 5, 2), (6, 2, 10, 2), (3, 4, 10, 2)])
def test_groups_by_other_sizes_than_those_of_the_rows_are_refused(sizes):
    def grouped(x):
        return torch.ops.aten.native_group_norm(x, None, None, *sizes[:3], sizes[3], 1e-5)[0]

    assert isinstance(label_of(grouped, (6, 4, 5), Rows(0)), Refused)


TABLE = torch.zeros(5, 2)
ALIKE = {
    "words": lambda words, x: words,
    "a column": lambda words, x: words.transpose(0, 1)[2],
    "an offset for each column": lambda words, x: words + torch.arange(4),
    "whole numbers": lambda words, x: torch.where(words > 3, 2 * words - words, words.clamp(0, 4)),
}
UNLIKE = {
    "an offset for each place": lambda words, x: words + torch.arange(3)[:, None],
    "an offset for each number": lambda words, x: words + torch.arange(12).view(3, 4),
    "a comparison of numbers that may be drawn": lambda words, x: words + (x < 0.5),
    "a cast": lambda words, x: x.long(),
    "computed numbers": lambda words, x: (2.5 * x).long(),
}


@pytest.mark.parametrize("name", ALIKE | UNLIKE)
def test_a_choice_that_may_raise_follows_from_whole_numbers_alike_at_all_places(name):
    """Else a unit could raise at one place, and its copy in an empty place might not."""
    chosen = (ALIKE | UNLIKE)[name]
    given = [torch.zeros((3, 4), dtype=torch.long), torch.zeros(3, 4)]
    graph = traced(lambda words, x: nn.functional.embedding(chosen(words, x), TABLE), given).graph
    words, x, *_, last, _ = graph.nodes
    assert isinstance(labels(graph, 3, {words: Rows(0), x: Rows(0)})[last], Refused) == (name in UNLIKE)


def test_a_tag_of_ones_own_operation_proves_nothing():
    torch.library.define("of_a_test::moved", "(Tensor x) -> Tensor", tags=torch.Tag.pointwise)
    torch.library.impl("of_a_test::moved", "CompositeExplicitAutograd", lambda x: x.roll(1, 0))
    torch.library.register_fake("of_a_test::moved", torch.empty_like)
    assert isinstance(label_of(torch.ops.of_a_test.moved, (3, 4), Rows(0)), Refused)
