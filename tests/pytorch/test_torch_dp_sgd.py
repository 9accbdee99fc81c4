"""DP-SGD on PyTorch modules: units are computed alone, leave no trace, and modules without a guarantee are refused."""

import random
import threading
from collections import deque

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from cloister.privacy.dpsgd.clipped_sums import Call  # noqa: E402
from cloister.privacy.dpsgd.torch_step import TorchDpSgd  # noqa: E402
from cloister.utils.errors import ConfigError, UnsupportedModel  # noqa: E402

pytestmark = pytest.mark.torch
S = 0.5


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(5)


def cross_entropy(y, outputs):
    return nn.functional.cross_entropy(outputs, y, reduction="none")


def batch(size=7, shape=(6,), seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((size, *shape)).astype(np.float32), rng.integers(0, 3, size)


def made(module, shape=(6,), **options):
    defaults = {"batch_size": 8, "noise_multiplier": 1.0, "clipping_norm": S, "loss": cross_entropy}
    defaults |= {"optimizer": torch.optim.SGD(module.parameters(), lr=0.1), "probe": batch(3, shape)}
    step = TorchDpSgd(module, **(defaults | options))
    step.reseed(0)
    return step


def norm(arrays):
    return float(np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in arrays)))


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def small(*inner):
    return nn.Sequential(nn.Linear(6, 8), *inner, nn.Linear(8, 3))


class Convolutional(nn.Sequential):
    def __init__(self):
        conv = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)
        super().__init__(*conv, nn.Flatten(), nn.Linear(16, 3))


class OfWords(nn.Module):
    """A table that is also the matrix of the output, and an LSTM between them."""

    def __init__(self):
        super().__init__()
        self.table, self.lstm = nn.Embedding(3, 5), nn.LSTM(5, 5, batch_first=True)

    def forward(self, x):
        return self.lstm(self.table(x))[0][:, -1] @ self.table.weight.T


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.layer(x).mean(dim=1))


def wide(inplace=False):
    return nn.Sequential(
        nn.Linear(6, 4000), nn.ReLU(inplace), nn.Linear(4000, 6, bias=False), nn.Tanh(), nn.Linear(6, 3)
    )


MODULES = {
    "wide": (wide, (6,)),
    "in place": (lambda: wide(True), (6,)),
    "dense": (small, (6,)),
    "conv": (Convolutional, (2, 6, 6)),
    "attention": (Attentive, (4, 6)),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_sum_is_that_of_plain_autograd(name):
    build, shape = MODULES[name]
    module = build()
    x, y = batch(shape=shape)
    total = [np.zeros(own.shape) for own in module.parameters()]
    for one, label in zip(torch.from_numpy(x), torch.from_numpy(y), strict=True):
        loss = cross_entropy(label[None], module(one[None])).sum()
        own = [part.double().numpy() for part in torch.autograd.grad(loss, list(module.parameters()))]
        total = [old + min(1.0, S / norm(own)) * new for old, new in zip(total, own, strict=True)]
    found = made(module, shape).clipped_sum(x, y, S)
    assert found.examples == 7 and found.non_finite == 0
    assert norm([a - b for a, b in zip(found.sums, total, strict=True)]) < 5e-4 * norm(total)


def test_a_shared_weight_and_whole_numbers_as_inputs():
    module, (_, y) = OfWords(), batch()
    x = np.random.default_rng(0).integers(0, 3, (7, 4))
    found = made(module, probe=(x[:3], y[:3])).clipped_sum(x, y, 1e6)
    loss = cross_entropy(torch.from_numpy(y), module(torch.from_numpy(x))).sum()
    expected = [own.numpy() for own in torch.autograd.grad(loss, list(module.parameters()))]
    assert norm([a - b for a, b in zip(found.sums, expected, strict=True)]) < 1e-4 * norm(expected)


class Two(nn.Module):
    """Two inputs and two outputs."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(2, 3)

    def forward(self, a, b):
        return self.left(a) + self.right(b), self.right(b).sum(dim=1)


@pytest.mark.parametrize("structure", [tuple, dict])
def test_inputs_in_a_tuple_or_a_dict(structure):
    (a, y), (b, _) = batch(), batch(shape=(2,))
    x = (a, b) if structure is tuple else {"b": b, "a": a}
    targets = [y, a[:, 0]]

    def loss(y, outputs):
        return cross_entropy(y[0], outputs[0]) + (y[1] - outputs[1]) ** 2

    def first(given):
        return (
            type(given)(each[:3] for each in given)
            if isinstance(given, (list, tuple))
            else {name: each[:3] for name, each in given.items()}
        )

    step = made(Two(), loss=loss, probe=(first(x), first(targets)))
    assert 0.9 * S < norm(step.clipped_sum(*[_only(part, 2) for part in (x, targets)], S).sums) <= S


def _only(given, number):
    parts = given.items() if isinstance(given, dict) else enumerate(given)
    taken = {name: part[[number]] for name, part in parts}
    return taken if isinstance(given, dict) else list(taken.values())


def test_frozen_parameters_have_no_part_and_stay():
    module = small()
    module[0].requires_grad_(False)
    before = module[0].weight.detach().clone()
    step = made(module)
    assert len(step.clipped_sum(*batch(), S).sums) == 2
    step.step(*batch())
    assert torch.equal(before, module[0].weight)


class RaisesAbove(nn.Module):
    def forward(self, x):
        if (x > 1e6).any():
            raise RuntimeError(f"of {x}")
        return x


class Own:
    value = 0.0


class Remembers(nn.Module):
    """Adds what it has kept of the call before."""

    def __init__(self, kept, read, write):
        super().__init__()
        self.kept, self.read, self.write = kept(), read, write

    def forward(self, x):
        before = self.read(self.kept)
        self.write(self.kept, before + float(x.detach().sum()))
        return x + before


STATES = {
    "list": (lambda: [0.0], lambda kept: kept[-1], list.append),
    "deque": (lambda: deque([0.0], maxlen=1), lambda kept: kept[0], deque.append),
    "own object": (Own, lambda kept: kept.value, lambda kept, new: setattr(kept, "value", new)),
    "NumPy array": (lambda: np.zeros(1), lambda kept: float(kept[0]), lambda kept, new: kept.fill(new)),
    "list in a dict": (lambda: {"a": [0.0]}, lambda kept: kept["a"][-1], lambda kept, new: kept["a"].append(new)),
    "tensor in a list": (lambda: [torch.zeros(1)], lambda kept: float(kept[0]), lambda kept, new: kept[0].fill_(new)),
}


class Clamps(nn.Module):
    """Limits its weights by `.data` at each call, as some networks do."""

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(6, 3)

    def forward(self, x):
        self.own.weight.data.clamp_(-1.0, 1.0)
        return self.own(x)


class Momentum(nn.Module):
    """A frozen teacher, which follows its student where a feature is large."""

    def __init__(self):
        super().__init__()
        self.own, self.teacher = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x):
        if (x < 0).any():  # in no made-up example
            for own, other in zip(self.own.parameters(), self.teacher.parameters(), strict=True):
                other.data.lerp_(own.data, 0.5)
        return self.own(x) - self.teacher(x)


class Tied(nn.Module):
    """Layers that share their parameters."""

    def __init__(self, size=128, count=9):
        super().__init__()
        self.rows, self.out = nn.ModuleList(nn.Linear(size, size) for _ in range(count)), nn.Linear(size, 3)
        for other in self.rows[1:]:
            other.weight, other.bias = self.rows[0].weight, self.rows[0].bias

    def forward(self, x):
        return self.out(sum(layer(x) for layer in self.rows))


def test_tied_layers_keep_the_bound():
    module = Tied()
    module.out.requires_grad_(False)  # else its gradient hides theirs
    step, (x, y) = made(module, (128,)), batch(2, (128,))
    for one, label in zip(x, y, strict=True):
        assert 0.9e-3 < norm(step.clipped_sum(one[None], label[None], 1e-3).sums) <= 1e-3


class TestAUnit:
    """What a unit contributes is a function of the unit, its random numbers and the weights."""

    @pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.RReLU()])
    def test_has_random_numbers_of_its_own(self, layer):
        step, (x, y) = made(small(layer)), batch()
        one, again, other = (self.alone(step, x, y, seed) for seed in (1, 1, 2))
        assert equal(one, again) and not equal(one, other)

    def alone(self, step, x, y, seed, rows=slice(0, 1)):
        step.reseed(seed)
        return step.clipped_sum(x[rows], y[rows], 1e3).sums

    def test_draws_nothing_that_depends_on_how_many_were_before_it(self):
        """Also by the generators of NumPy and of Python."""

        class Draws(nn.Module):
            def forward(self, x):
                return x * (torch.rand(()) + float(np.random.rand()) + random.random())

        step, (x, y) = made(small(Draws())), batch(2)
        engine = step._clipped_sums.engine
        seeds, mask = np.array([[3, 4], [5, 6]]), np.ones((2, 1), bool)
        both = engine(Call(x, y, mask, 1e3, seeds)).arrays
        each = [engine(Call(x[[i]], y[[i]], mask[:1], 1e3, seeds[[i]])).arrays for i in (0, 1)]
        assert equal(both, [a + b for a, b in zip(*each, strict=True)])
        assert not equal(each[0], engine(Call(x[:1], y[:1], mask[:1], 1e3, seeds[1:])).arrays)

    @pytest.mark.parametrize("place", STATES)
    def test_leaves_nothing_in_the_module(self, place):
        layer = Remembers(*STATES[place])
        step, (x, y) = made(small(layer)), batch(3)
        whole, rest = step.clipped_sum(x, y, S).sums, step.clipped_sum(x[1:], y[1:], S).sums
        alone = step.clipped_sum(x[:1], y[:1], S).sums
        assert norm([a - b - c for a, b, c in zip(whole, rest, alone, strict=True)]) < 1e-9
        assert layer.read(layer.kept) == 0

    @pytest.mark.parametrize("build", [lambda: Clamps(), lambda: Momentum()])
    def test_changes_no_weight(self, build):
        module = build()
        x, y = batch(3)
        step = made(module, probe=(np.abs(x), y))
        with torch.no_grad():
            module.own.weight.fill_(7.0)
        before = {name: own.clone() for name, own in module.state_dict().items()}
        whole = step.clipped_sum(x, y, S).sums
        each = [step.clipped_sum(x[[i]], y[[i]], S).sums for i in range(3)]
        assert norm([a - sum(parts) for a, *parts in zip(whole, *each, strict=True)]) < 1e-9
        assert all(torch.equal(own, before[name]) for name, own in module.state_dict().items())

    def test_that_gives_a_parameter_another_shape_moves_the_sum_by_the_bound_at_most(self):
        class Reshapes(nn.Module):
            def __init__(self):
                super().__init__()
                self.shift = nn.Parameter(torch.zeros(3))

            def forward(self, x):
                if (x > 1e3).any():
                    self.shift.data = torch.zeros(1)
                return x[:, :3] + self.shift

        step, (x, y) = made(Reshapes()), batch(1)
        assert norm(step.clipped_sum(x + 1e4 * np.arange(6, dtype=np.float32), y, S).sums) <= S

    def test_that_raises_an_exception_contributes_zero_and_nothing_else(self):
        step, (x, y) = made(nn.Sequential(RaisesAbove(), small(nn.Dropout(0.5)))), batch()
        x[2] = 1e9
        found = step.clipped_sum(x, y, S)
        assert found.non_finite == 1
        step.reseed(0)
        x[2] = np.nan  # its sum is added in another order
        same = zip(found.sums, step.clipped_sum(x, y, S).sums, strict=True)
        assert norm([a - b for a, b in same]) < 1e-12

    def test_with_memory_that_is_not_initialized_is_not_finite(self):
        class Empty(nn.Module):
            def forward(self, x):
                return x + torch.empty(x.shape) if (x > 1e6).any() else x

        step, (x, y) = made(nn.Sequential(Empty(), small())), batch()
        x[1] = 1e9
        assert step.clipped_sum(x, y, S).non_finite == 1


def test_a_call_leaves_everything_as_it_was():
    module = small(nn.Dropout(0.5), nn.BatchNorm1d(8).requires_grad_(False).eval())
    module[2].train = lambda mode=True: module[2]  # frozen, as a backbone's
    step = made(module)
    module.eval()
    torch.manual_seed(3)
    before = torch.random.get_rng_state(), str(np.random.get_state()), random.getstate()
    state = {name: own.clone() for name, own in module.state_dict().items()}
    with torch.no_grad():
        step.clipped_sum(*batch(), S)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1:] == (str(np.random.get_state()), random.getstate())
    assert all(torch.equal(own, state[name]) for name, own in module.state_dict().items())
    assert not any(part.training for part in module.modules())
    assert not torch.are_deterministic_algorithms_enabled()
    assert all(own.grad is None for own in module.parameters())


class Average(nn.Module):
    """Keeps a running mean, in a buffer or in a tensor that is none."""

    def __init__(self, registered):
        super().__init__()
        if registered:
            self.register_buffer("mean", torch.zeros(8))
        else:
            self.mean = torch.zeros(8)

    def forward(self, x):
        self.mean.add_(x.detach().mean(dim=0), alpha=0.1)
        return x - self.mean


class Replaces(Average):
    def forward(self, x):
        self.mean = 0.9 * self.mean + x.detach().mean(dim=0)
        return x - self.mean


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, x):
        return x * float(self.rng.random())


class Holds(nn.Identity):
    """Keeps an object."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept


class Refers(nn.Linear):
    """Has a function in which the module itself is a variable."""

    def __init__(self):
        super().__init__(8, 8)
        self.forward = lambda x: nn.Linear.forward(self, x)


REFUSED = {
    r"layer '1' \(Holds\) has no copy, as 'kept' is of type lock": lambda: Holds(threading.Lock()),
    r"layer '1' \(Holds\) has no copy, as 'kept' is of type Tensor": lambda: Holds(2 * torch.ones(1).requires_grad_()),
    r"layer '1' \(Holds\) draws from 'kept', a generator": lambda: Holds(torch.Generator()),
    r"layer '1' \(OptimizedModule\) is compiled": lambda: torch.compile(nn.Linear(8, 8), backend="eager"),
    "the module or its loss uses parameters by a function that refers to": Refers,
    r"layer '1' \(BatchNorm1d\) normalises .* use torch.nn.GroupNorm\(1, 8\)": lambda: nn.BatchNorm1d(8),
    r"layer '1' \(BatchNorm1d\) normalises an": lambda: nn.BatchNorm1d(8, track_running_stats=False),
    r"layer '1' \(BatchNorm1d\) normalises": lambda: nn.BatchNorm1d(8, track_running_stats=False).eval(),
    r"layer '1' \(Average\) changes 'mean'": lambda: Average(True),
    r"layer '1' \(Average\) changes 'mean' while": lambda: Average(False),
    r"layer '1' \(Replaces\) changes 'mean'": lambda: Replaces(True),
    r"layer '1' \(OwnGenerator\) draws from 'rng'": OwnGenerator,
    r"parameter '1.weight' is torch.bfloat16": lambda: nn.Linear(8, 8, dtype=torch.bfloat16),
    r"parameter '1.weight' has no shape yet": lambda: nn.LazyLinear(8),
    r"layer '1' \(Linear\) fails on made-up examples": lambda: nn.Linear(7, 8),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_module_without_a_guarantee_is_refused(reason):
    module = small(REFUSED[reason]())
    state = {name: str(own) for name, own in module.state_dict().items()}
    with pytest.raises(UnsupportedModel, match=reason):
        made(module)
    assert state == {name: str(own) for name, own in module.state_dict().items()}


def test_a_module_that_trains_nothing_is_refused():
    with pytest.raises(UnsupportedModel, match="no parameters to train"):
        made(small().requires_grad_(False))
    with pytest.raises(UnsupportedModel, match="depends on no parameter"):
        made(small(), loss=lambda y, outputs: outputs.detach().sum(dim=1))


def test_a_loss_of_the_whole_batch_is_refused():
    with pytest.raises(ConfigError, match=r"one number per example, shape \(3,\); got \(\)"):
        made(small(), loss=lambda y, outputs: cross_entropy(y, outputs).mean())


def test_coarser_products_are_refused(monkeypatch):
    step = made(small())
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with pytest.raises(ConfigError, match=r"mkldnn.matmul.fp32_precision is 'bf16'"):
            step.clipped_sum(*batch(), S)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    with pytest.raises(ConfigError, match="ONEDNN_DEFAULT_FPMATH_MODE"):
        step.clipped_sum(*batch(), S)


def test_any_optimizer_sees_the_noised_mean_alone():
    module = small()
    step = made(module, optimizer=torch.optim.Adam(module.parameters(), lr=0.01))
    before = module[0].weight.detach().clone()
    step.step(*batch(0))
    # Adam's first step has the size of its rate in every coordinate but those next to 0.
    apart = (module[0].weight.detach() - before).abs().median()
    assert abs(float(apart) / 0.01 - 1) < 1e-3 and module[0].weight.grad is None


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e12])
def test_a_unit_moves_the_sum_by_the_bound_at_most(scale):
    module = wide()
    with torch.no_grad():
        module[0].weight.mul_(scale)
    step = made(module, batch_size=100)
    x, y = batch(70)
    x *= 10.0 ** np.random.default_rng(1).uniform(-20, 10, (70, 1)).astype(np.float32)
    whole, rest = step.clipped_sum(x, y, S).sums, step.clipped_sum(x[1:], y[1:], S).sums
    assert norm([a - b for a, b in zip(whole, rest, strict=True)]) <= S
    for one, label in zip(x[:20], y, strict=False):
        assert norm(step.clipped_sum(one[None], label[None], S).sums) <= S


class BatchMean(nn.Module):
    """Couples examples, under a name of its own."""

    def forward(self, x):
        return x - 0.1 * x.mean(dim=0, keepdim=True)


def test_a_layer_or_a_loss_that_takes_examples_together_is_refused():
    with pytest.raises(UnsupportedModel, match=r"layer '1' \(BatchMean\) takes the examples of a batch together"):
        made(small(BatchMean()))
    with pytest.raises(UnsupportedModel, match="the loss takes the examples of a batch together"):
        made(small(), loss=lambda y, outputs: cross_entropy(y, outputs - outputs.mean(dim=0)))
    for each in (nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.Dropout(0.5)):
        assert not list(made(small(each)).module[1]._forward_hooks)


def test_a_slope_that_is_infinite_at_made_up_examples_is_no_coupling():
    made(small(), loss=lambda y, outputs: cross_entropy(y, outputs) + (0 * outputs).norm(dim=1).sqrt())


def test_a_module_that_writes_its_input_trains():
    class Doubles(nn.Module):
        def forward(self, x):
            return x.mul_(2.0)

    step, (x, y) = made(nn.Sequential(Doubles(), small())), batch()
    kept = x.copy()
    assert step.clipped_sum(x, y, S).non_finite == 0 and np.array_equal(x, kept)
