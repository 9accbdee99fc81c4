"""A server that sends whatever Flower's types allow, as a state machine against two nodes that differ in one row.

After every message: the replies are the same but for what noise was added to, and that differs by no more than was
charged; the ledgers are the same; no budget is passed.
"""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from adversary.twins import ROWS, Twins, content_of, rows_of_digits
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cloister.privacy.accounting.budget import PrivacyBudget

ROUNDING = 1 + 1e-6
SCALES = (0.0, 1e-45, 1e-38, 1e-19, 1e-6, 1.0, 1e6, 1e19, 1e30, 3e38)
PATTERNS = ("zeros", "ones", "random", "cancelling", "saturated", "one class")
OTHERS = ("far", "zero", "tiny", "huge", "not a number", "no such label", "missing")


def kernel_and_bias(pattern, scale, seed):
    rng = np.random.default_rng(seed)
    kernel, bias = np.zeros((64, 10)), np.zeros(10)
    if pattern == "ones":
        kernel += 1
    elif pattern == "random":
        kernel, bias = rng.standard_normal((64, 10)), rng.standard_normal(10)
    elif pattern == "cancelling":
        kernel += rng.standard_normal((64, 1)) * np.resize([1, -1], 10)
    elif pattern == "saturated":
        bias[0] = 1
    elif pattern == "one class":
        kernel[:, 3] = 1
    with np.errstate(over="ignore"):
        return {
            "softmax/kernel": np.clip(scale * kernel, -3.4e38, 3.4e38).astype(np.float32),
            "softmax/bias": np.clip(scale * bias, -3.4e38, 3.4e38).astype(np.float32),
        }


def spoilt(arrays, how):
    """A model that is none, in one of several ways."""
    kernel = arrays["softmax/kernel"].copy()
    if how in ("nan", "inf"):
        kernel[5, 5] = float(how)
    elif how == "transposed":
        kernel = kernel.T
    elif how == "double":
        kernel = kernel.astype(np.float64)
    elif how == "other name":
        return arrays | {"softmax/other": kernel}
    elif how == "missing":
        return {"softmax/bias": arrays["softmax/bias"]}
    return arrays | {"softmax/kernel": kernel}


models = st.builds(
    kernel_and_bias, st.sampled_from(PATTERNS), st.sampled_from(SCALES) | st.floats(0, 3e38), st.integers(0, 9)
)
payloads = st.one_of(
    models,
    models,
    models,
    st.builds(spoilt, models, st.sampled_from(("nan", "inf", "transposed", "double", "other name", "missing"))),
    st.builds(
        lambda *several: {f"{i}/{name}": array for i, one in enumerate(several) for name, array in one.items()},
        models,
        models,
    ),
)
numbers = st.sampled_from((1e-46, 1e-30, 1e-12, 1e-6, 1e-3, 0.5, 1.0, 2.0, 1e3, 1e6, 1e19, 1e38))
TRAINING = {
    "task.test-fraction": st.sampled_from((0.0, 0.2, 0.5, 0.999999)),
    "client.learning-rate": numbers,
    "client.batch-size": st.integers(1, 40),
    "client.local-epochs": st.integers(1, 3),
    "client.schedule": st.sampled_from(("auto", "linear", "cosine")),
    "client.loss-scale": st.just("auto") | numbers,
    "client.class-weights": st.sampled_from(("auto", "1,2,3,4,5,6,7,8,9,10", "1e-30,1,1,1,1e38,1,1,1,1,1e30")),
    "client.augmentation": st.sampled_from(("auto", "flip", "shift,flip")),
}
OWN = {
    "dp-sgd": {"privacy.dp-sgd-clipping-norm": numbers}
    | {"privacy.dp-sgd-noise-multiplier": st.sampled_from((0.5, 1.0, 3.0, 50.0))},
    "gaussian": {"privacy.gaussian-clipping-norm": numbers}
    | {"privacy.gaussian-noise-multiplier": st.sampled_from((0.5, 3.0, 50.0, 1e6))},
    "laplace": {
        "privacy.radius": numbers,
        "privacy.per-layer": st.booleans(),
        "privacy.laplace-noise-multiplier": st.sampled_from((0.5, 50.0, 650.0, 1e6)),
    },
    "none": {},
}
CHOICE = {
    "privacy.choice": st.just("private"),
    "privacy.choice-epsilon": st.sampled_from((1e-3, 0.1, 1.0)),
    "privacy.max-loss": numbers,
}
ODD = {
    "task.name": st.just("breast-cancer"),
    "privacy.choice": st.just("exact"),
    "privacy.batch-sampling": st.just("shuffle"),
    "privacy.noise-seed": st.just(3),
    "privacy.client-max-epsilon": numbers,
    "privacy.dp-sgd-noise-multiplier": numbers,
    "strategy.weighting": st.sampled_from(("examples", "uniform")),
    "evaluation.federated": st.just("on"),
    "evaluation.held-out-clients": st.just(0.3),
    "privacy.server": st.sampled_from(("global-dp", "metric")),
}


@st.composite
def configurations(draw):
    """Mostly runs that a node takes part in; now and then one key that is out of place."""
    client = draw(st.sampled_from(("dp-sgd", "dp-sgd", "gaussian", "laplace", "none")))
    server = draw(st.sampled_from(("none", "none", "laplace-clustering")))
    keys = {"task.name": st.just("digits"), "task.model": st.just("softmax")} | TRAINING | OWN[client]
    if server == "laplace-clustering":
        keys |= {"privacy.clusters": st.integers(1, 2)}
        keys |= CHOICE if client != "none" else {}
    found = draw(st.fixed_dictionaries(keys)) | {"privacy.client": client, "privacy.server": server}
    if draw(st.integers(0, 5)) == 0:
        odd = draw(st.sampled_from(sorted(ODD)))
        found[odd] = draw(ODD[odd])
    return found


def gaussians(*multipliers):
    """Return a server's promise: releases with Gaussian noise."""
    return [json.dumps({"kind": "gaussian", "noise_multiplier": z}) for z in multipliers]


@st.composite
def fields(draw, run):
    """Mostly what a server says in such a run; now and then something else."""
    said = {"server-round": draw(st.integers(0, 5)), "seed": draw(st.integers(0, 3))}
    if run["privacy.server"] == "laplace-clustering":
        said["hypotheses"] = run["privacy.clusters"]
    if draw(st.integers(0, 5)) == 0:
        odd = {
            "hypotheses": st.sampled_from((1, 2, True, 0, "2")),
            "proximal-mu": st.sampled_from((0.0, 0.1, 1e6, -1.0, float("nan"))),
            "privacy-events": st.sampled_from((gaussians(1.0), gaussians(1e-9), gaussians(float("nan")), ["z"], [3.0])),
            "server-round": st.sampled_from((True, -1, 2**40, 1.5)),
            "batch": st.just(3),
        }
        name = draw(st.sampled_from(sorted(odd)))
        said[name] = draw(odd[name])
    return said


@st.composite
def messages(draw):
    """A run configuration, a model and what is said beside it."""
    run = draw(configurations())
    several = [draw(models) for _ in range(run.get("privacy.clusters", 0))]
    fitting = {f"{i}/{name}": array for i, one in enumerate(several) for name, array in one.items()} or draw(models)
    return run, draw(payloads) if draw(st.integers(0, 7)) == 0 else fitting, draw(fields(run))


class HostileServer(RuleBasedStateMachine):
    """Any messages in any order."""

    @initialize(other=st.sampled_from(OTHERS), seed=st.integers(0, 99), budget=st.sampled_from((3.0, 60.0, 1e5)))
    def connect(self, other, seed, budget):
        self.folder = Path(tempfile.mkdtemp())
        x, y = rows_of_digits(np.random.default_rng(seed), ROWS)
        y[-1] = 0
        self.twins = Twins(self.folder, x, y, *neighbour(x, y, other), budget=budget)
        self.other, self.budget = other, budget

    def teardown(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    @rule(message=messages())
    def train(self, message):
        self.compare(message[0], *self.twins.ask(*message))

    @rule(message=messages(), again=st.integers(2, 4))
    def train_again_and_again(self, message, again):
        for _ in range(again):
            self.compare(message[0], *self.twins.ask(*message))

    @rule(message=messages(), kind=st.sampled_from(("evaluate", "query")))
    def ask_for_something_else(self, message, kind):
        one, other = self.twins.ask(*message, kind)
        assert content_of(one) == content_of(other)

    def compare(self, run, one, other):
        assert content_of(one) == content_of(other), "something leaves past the noise"
        seen, also = self.twins.coupling.seen
        assert len(seen) == len(also)
        if run["privacy.client"] != "laplace":  # whose scale is itself drawn at random
            assert [each.std for each in seen] == [each.std for each in also]
        bound = self.bound(run)
        for released, twin in zip(seen, also, strict=True):
            assert np.linalg.norm(released.values - twin.values) <= bound(released.std) * ROUNDING
        for scores, others in zip(*self.twins.coupling.scores, strict=True):
            # In units of the sensitivity: whatever one row does, no score moves by more than one.
            assert all(abs(a - b) <= 1 for a, b in zip(scores, others, strict=True))

    def bound(self, run):
        """Return the largest distance of two noised inputs, in standard deviations of the noise."""
        multiplier = run.get(f"privacy.{run['privacy.client']}-noise-multiplier", 1.0)
        if run["privacy.client"] == "dp-sgd":
            return lambda std: (1 if self.other == "missing" else 2) * std / multiplier
        if run["privacy.client"] == "gaussian":
            return lambda std: 2 * std / multiplier
        parts = 2 if run.get("privacy.per-layer") else 1
        return lambda std: 2 * run.get("privacy.radius", 0.0) * parts**0.5

    @invariant()
    def ledgers_are_the_same_and_within_the_budget(self):
        if not hasattr(self, "twins"):
            return
        assert self.twins.events(0) == self.twins.events(1)
        budget = PrivacyBudget(self.twins.ledger(0), "", "example", 1e-5, self.budget)
        assert budget.share() <= 1


def neighbour(x, y, other):
    """The same data but for the last row, which is missing or another."""
    if other == "missing":
        return x[:-1], y[:-1]
    x, y = x.copy(), y.copy()
    y[-1] = 77 if other == "no such label" else 9
    x[-1] = {"far": 1.0, "zero": 0.0, "tiny": 1e-40, "huge": 3e38, "not a number": np.nan}.get(other, 0.5)
    return x, y


def run(examples, steps, phases=tuple(Phase)):
    relaxed = settings(
        phases=phases,
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(HostileServer, settings=relaxed)


def test_no_sequence_of_messages_learns_more_than_was_charged():
    run(examples=8, steps=12)


@pytest.mark.slow(minutes=1)
def test_no_long_sequence_of_messages_learns_more_than_was_charged():
    run(examples=50, steps=20)


def _unclipped(*_):
    return 1.0


BROKEN = {
    "updates that are not projected": "cloister.privacy.mechanisms.local.factor_for",
    "gradients that are not clipped": "cloister.privacy.dpsgd.noise._factor",
}


def find(examples):
    """Until the first failure, which need not be made small."""
    run(examples=examples, steps=12, phases=(Phase.generate,))


@pytest.mark.parametrize(
    "name", [pytest.param("updates that are not projected", marks=pytest.mark.slow), "gradients that are not clipped"]
)
def test_the_machine_finds(name, monkeypatch):
    monkeypatch.setattr(BROKEN[name], _unclipped)
    with pytest.raises(AssertionError):
        find(examples=500)


@pytest.mark.slow
def test_the_machine_finds_errors_that_depend_on_data(monkeypatch):
    monkeypatch.setattr("cloister.client.app._contained", lambda work, _: work())
    with pytest.raises(AssertionError, match="past the noise"):
        find(examples=500)


@pytest.mark.slow
def test_the_machine_finds_charges_that_follow_the_data(monkeypatch):
    monkeypatch.setattr("cloister.client.costs.size_of", lambda node: len(np.load(node.data_path)["y"]))
    with pytest.raises(AssertionError):
        find(examples=500)
