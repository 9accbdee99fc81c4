"""`cloister check kernels` with PyTorch: it passes where kernels keep rows apart, and fails where one does not."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from cloister.audits import torch_kernels as kernels  # noqa: E402
from cloister.audits.kernels import BROKEN, KEPT  # noqa: E402
from cloister.cli import FAILED, app  # noqa: E402
from cloister.privacy.dpsgd.torch_isolation_rules import RULES  # noqa: E402

pytestmark = pytest.mark.torch


class Coupled(nn.Module):
    """Adds nothing of a mean over all rows, unless one of them has no finite number."""

    def forward(self, x):
        return x + 0.0 * x.detach().mean(dim=0, keepdim=True)


def checked(monkeypatch, seconds=1):
    """Return the exit code, the counts of each module and the verdict."""
    torch.set_num_threads(1)
    monkeypatch.setattr(kernels, "Trial", partial(kernels.Trial, seed=1))
    done = CliRunner().invoke(app, ["check", "kernels", "--framework", "torch", "--seconds", str(seconds)])
    platform, header, *lines, verdict = done.stdout.splitlines()
    assert "PyTorch" in platform and header.split()[0] == "model", done.stdout
    return done.exit_code, [tuple(map(int, line.split()[-3:])) for line in lines], verdict


def test_rows_are_kept_apart_and_equal_calls_are_equal(monkeypatch):
    """`test_torch_rows` has the other models."""
    few = {name: kernels.MODELS[name] for name in ("dense, units of three examples", "words", "losses")}
    monkeypatch.setattr(kernels, "MODELS", few)
    code, counts, verdict = checked(monkeypatch)
    cases = sum(each[0] for each in counts)
    assert code == 0 and len(counts) == len(few) and verdict == KEPT.format(cases, cases)
    assert all(each[0] >= 1 and each[1:] == (0, 0) for each in counts)


def test_a_graph_that_couples_rows_is_reported(monkeypatch):
    """A wrong rule takes the mean over all units for a constant."""
    monkeypatch.setitem(RULES, "mean.dim", lambda step: None)
    coupled = kernels.Model(lambda: nn.Sequential(nn.Linear(5, 4), Coupled()), (5,))
    monkeypatch.setattr(kernels, "MODELS", {"coupled": coupled})
    code, ((cases, changed, differed),), verdict = checked(monkeypatch)
    assert code == FAILED and verdict == BROKEN and 0 < changed <= cases and differed == 0


def test_equal_calls_that_differ_are_reported(monkeypatch):
    monkeypatch.setattr(kernels, "MODELS", {"unsteady": kernels.Model(Unsteady, (5,))})
    code, ((cases, _, differed),), verdict = checked(monkeypatch)
    assert code == FAILED and verdict == BROKEN and 0 < differed <= cases


class Unsteady(nn.Linear):
    """Counts calls outside of itself, and follows numbers of its inputs, so that units are computed in turn."""

    calls = 0

    def __init__(self):
        super().__init__(5, 4)

    def forward(self, x):
        Unsteady.calls += 1
        return super().forward(x if x.tolist() else -x) * Unsteady.calls
