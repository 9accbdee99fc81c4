"""Labels of operations of PyTorch cover what data flow shows, forward and backward, along every axis of units."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from cloister.privacy.dpsgd.labels import Refused, Rows, misfit  # noqa: E402
from cloister.privacy.dpsgd.torch_isolation import labels  # noqa: E402
from cloister.privacy.dpsgd.torch_isolation_rules import RULES, name_of, tensors_in  # noqa: E402
from cloister.privacy.dpsgd.torch_tracing import graph_of  # noqa: E402
from cloister.privacy.dpsgd.torch_tracing import traced as traced_graph  # noqa: E402

pytestmark = pytest.mark.torch
UNITS = 3
MATRIX, PIXELS = (6, 6), (6, 3, 6, 6)
W = torch.linspace(-1, 1, 36).view(6, 6)
PLACES = torch.arange(36).view(6, 6) % 5

OF_MATRICES = {
    "products": lambda x: (x @ W, W @ x, torch.addmm(W, x, W), torch.addmm(W, W, x), x @ x.T),
    "views": lambda x: (x.view(3, 12), x.reshape(2, 3, 6), x.T, x.t(), x.view(-1), x.unsqueeze(1), x[None].squeeze(0)),
    "parts": lambda x: (x[:3], x[:, 2:4], x[0], x[:, 0], *x.split(2), *x.split(3, 1), *x.unbind(1), *x.unbind(0)),
    "copies": lambda x: (x.repeat(2, 1), x.repeat(1, 2), x.expand(2, 6, 6), torch.cat([x, W]), torch.cat([x, W], 1)),
    "stacks": lambda x: (torch.stack([x, W]), torch.stack([x, x], 1), F.pad(x, (1, 2)), F.pad(x, (0, 0, 1, 2))),
    "turns": lambda x: (x.flip(0), x.flip(1), x.roll(1, 0), x.roll(2, 1), x.tril(), x.triu(), x.diagonal()),
    "sums": lambda x: (x.sum(0), x.mean(1, keepdim=True), x.amax(0), x.var(1), x.logsumexp(0), x.sum(), x.norm(dim=1)),
    "orders": lambda x: (x.softmax(0), x.log_softmax(1), x.cumsum(1), x.sort(0)[0], x.topk(2, 1)[0], F.glu(x, 1)),
    "pairs": lambda x: (x + W, x * x.sum(0), x * x.sum(1), x * x.sum(1, keepdim=True), torch.where(x > 0, x, W[0])),
    "norms": lambda x: (F.layer_norm(x, (6,), W[0], W[1]), F.layer_norm(x, (6, 6))),
    "losses": lambda x: (
        F.mse_loss(x, W, reduction="none"),
        F.cross_entropy(x, torch.arange(6), reduction="none"),
        F.nll_loss(x, torch.arange(6), reduction="none"),
        F.huber_loss(x, W, reduction="none"),
        F.cross_entropy(x, torch.arange(6)),
    ),
    "losses without a rule": lambda x: (
        F.binary_cross_entropy(x.sigmoid(), W.abs(), reduction="none"),
        F.hinge_embedding_loss(x, W.sign(), reduction="none"),
    ),
    "places": lambda x: (
        x[:, [2, 0]],
        x[[1, 0]],
        x.gather(1, PLACES),
        x.scatter(1, PLACES, x),
        x.max(1)[0],
        F.prelu(x, W[0, :1]),
    ),
    "several indices": lambda x: (
        x.view(6, 2, 3)[:, [0, 1], [2, 0]],
        x.view(6, 2, 3).transpose(0, 1)[[1, 0, 1], :, [2, 1, 0]],
        x.view(6, 2, 3)[:, [[0], [1]], [2, 0]],
        x[[0, 1], [2, 3]],
    ),
    "puts": lambda x: (
        put(x, (slice(None), [1, 3]), x[:, :2].exp()),
        put(torch.zeros(6, 6), ([1, 3],), x[:, :2].T),
        put(torch.zeros(2, 6, 3), ([0, 1, 1], slice(None), [2, 0, 1]), x[:, 1:4].T),
        put(torch.zeros(6, 6), (range(6), [1, 0, 3, 2, 5, 4]), x[:, 0]),
        x.index_add(1, PLACES[0], W * x),
        x.index_add(0, PLACES[0], W * x),
        x.index_copy(1, PLACES[0, :2], x[:, 2:4]),
        torch.slice_scatter(x, x[:, :3].exp(), 1, 2, 5),
        torch.slice_scatter(W, x[:, :3], 1, 2, 5),
        torch.select_scatter(x, x[:, 0].exp(), 1, 2),
        torch.zeros(6, 6).scatter(1, PLACES, x),
        W.scatter_add(1, PLACES, x),
        W.scatter(0, PLACES[:2], x[:2]),
    ),
}


def put(into, places, numbers):
    """Return a tensor with some numbers at some places, as an assignment makes it."""
    into = into.clone()
    into[places] = numbers
    return into


OF_PIXELS = {
    "convolutions": lambda x: (F.conv2d(x, W.view(4, 3, 3, 1)), F.conv2d(x, W[:3].view(3, 1, 3, 2), groups=3)),
    "pools": lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 2), F.unfold(x, 2)),
    "borders": lambda x: (F.pad(x, (1, 1, 2, 0), "reflect"), F.pad(x, (1, 1, 1, 1), "replicate"), F.interpolate(x, 9)),
    "losses of pixels": lambda x: (
        F.cross_entropy(x, torch.arange(216).view(6, 6, 6) % 3, reduction="none"),
        F.nll_loss(x, torch.arange(216).view(6, 6, 6) % 3, reduction="none"),
        F.cross_entropy(x, torch.arange(216).view(6, 6, 6) % 3),
    ),
    "volumes": lambda x: (F.avg_pool3d(x[:, None], (1, 2, 2)), F.max_pool3d(x[:, None], 2), x.unfold(2, 3, 2)),
    "more convolutions": lambda x: (
        F.conv3d(x[:, None], W.view(2, 1, 2, 3, 3)),
        F.conv_transpose2d(x, W.view(3, 3, 2, 2)),
    ),
    "instance norm": lambda x: (F.instance_norm(x), F.batch_norm(x, W[0, :3], W[1, :3].abs())),
    "group norm": lambda x: (F.group_norm(x, 3), F.group_norm(x, 1, W[0, :3], W[1, :3])),
    "layer norm": lambda x: (F.layer_norm(x, (6,)), F.layer_norm(x, (6, 6)), F.layer_norm(x, (3, 6, 6))),
    "batches of products": lambda x: (x @ W, W @ x, x @ x.mT, x @ x, torch.einsum("abcd,abed->abce", x, x)),
    "attention": lambda x: (F.scaled_dot_product_attention(x, x, W.expand(x.shape)),),
    "axes": lambda x: (x.permute(2, 0, 3, 1), x.transpose(1, 3), x.movedim(0, 2).reshape(3, 6, 36), x.flatten(0, 1)),
    "diagonals": lambda x: (x.diagonal(0, 2, 3), x.diagonal(0, 0, 2), x.select(2, 1), x[:, :, 1:3], x.sum((1, 3))),
}
ALL = {**{name: (f, MATRIX) for name, f in OF_MATRICES.items()}, **{name: (f, PIXELS) for name, f in OF_PIXELS.items()}}
UNPROVED = {
    "products": {"result 4", "slope 4"},
    "stacks": {"result 3", "slope 3"},
    "turns": {"result 6", "slope 6"},
    "sums": {"result 5", "slope 5"},
    "pairs": {"result 2", "slope 2"},
    "norms": {"result 1", "slope 1"},
    "losses": {"result 4", "slope 4"},
    "losses of pixels": {"result 2", "slope 2"},
    "diagonals": {"slope 0", "slope 1"},
    "several indices": {"result 3", "slope 3"},
    "puts": {"result 3", "slope 3"},
}
"""Numbers of results and slopes without a proved axis: they mix all units, or their backward has no rule."""


def slopes(function):
    """Return a function that also gives gradients, with respect to its input, of each result."""

    def both(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            made = [each for each in function(x) if each.requires_grad]
            found = [torch.autograd.grad(each, x, each.sin(), retain_graph=True)[0] for each in made]
        return [each.detach() for each in (*made, *found)]

    return both


def traced(function, shape):
    """Return the graph of results and gradients, as the graph of a round is made from that of losses."""
    given = [torch.zeros(shape)]
    return traced_graph(graph_of(slopes(traced_graph(function, given)), given), given)


@pytest.mark.parametrize("name", ALL)
def test_labels_cover_what_changes_with_a_unit(name):
    function, shape = ALL[name]
    torch.set_num_threads(1)
    source = torch.Generator().manual_seed(0)
    made = traced(function, shape)
    given, output = next(iter(made.graph.nodes)), list(made.graph.nodes)[-1]
    targets, proved = tensors_in(output.args[0]), set()
    for label in (Rows(axis, inner) for axis in range(len(shape)) for inner in (1, 2)):
        if misfit(label, shape, UNITS):
            continue
        found = labels(made.graph, UNITS, {given: label})
        one = torch.rand(shape, generator=source) + 0.1
        before = made(one)
        for unit in range(UNITS):
            own = torch.arange(shape[label.axis]) // label.inner % UNITS == unit
            other = one.clone().movedim(label.axis, 0)
            other[own] = torch.rand(other[own].shape, generator=source) * 3 - 1.5
            for target, old, new in zip(targets, before, made(other.movedim(0, label.axis)), strict=True):
                if isinstance(found[target], Refused):
                    continue
                changed = old != new
                if found[target] is not None:
                    mine = torch.arange(len(changed.movedim(found[target].axis, 0))) // found[target].inner % UNITS
                    changed = changed.movedim(found[target].axis, 0)[mine != unit]
                    proved.add(target)
                assert not changed.any(), (target, label, found[target])
    half = len(targets) // 2
    names = {f"result {number}": target for number, target in enumerate(targets[:half])}
    names |= {f"slope {number}": target for number, target in enumerate(targets[half:])}
    assert {each for each, target in names.items() if target not in proved} == UNPROVED.get(name, set())


def test_most_rules_are_tried():
    kinds = set()
    for function, shape in ALL.values():
        graph = traced(function, shape).graph
        kinds |= {name_of(node) for node in graph.nodes}
    assert len(kinds & set(RULES)) > 60, sorted(set(RULES) - kinds)
