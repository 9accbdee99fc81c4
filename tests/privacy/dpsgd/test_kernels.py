"""`cloister check kernels`: it passes where kernels keep rows apart, and says so where something does not."""

import itertools
import math
from functools import partial
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
from examples_of_dpsgd import LOSS, BatchMean, small
from typer.testing import CliRunner

from cloister.audits import keras_kernels as kernels
from cloister.audits.kernels import BROKEN, KEPT
from cloister.cli import FAILED, app
from cloister.privacy.dpsgd import checks, in_rows, in_turn
from cloister.privacy.dpsgd.step import engine_of
from cloister.privacy.dpsgd.tracing import made_up

CASES = 44
"""Cases of all models together. Some show nothing: all that is held of a unit is then NaN."""


REPEATED = {
    "twin": (lambda: small(keras.layers.Dense(4), keras.layers.Dense(4)), 1, 1),
    "trained recurrence": kernels.MODELS["trained recurrence"],
}


@pytest.fixture(scope="module")
def engines():
    """Return engines of models that several tests try. Each case draws the weights anew."""
    found = {}
    for name, (build, *sizes) in REPEATED.items():
        model = build()
        found[name] = engine_of(model, LOSS, made_up(model), *sizes)
    return found


@pytest.fixture(autouse=True)
def compiled_once(engines, monkeypatch):
    known = {found[0].model: found for found in engines.values()}
    monkeypatch.setattr(kernels, "engine_of", lambda model, *given: known.get(model) or engine_of(model, *given))


def repeated(engines, name):
    return {name: (lambda: engines[name][0].model, *REPEATED[name][1:])}


def tried(models, monkeypatch):
    """The command on models: its exit code, and the lines of a table and a verdict."""
    ticks = itertools.count(1)
    clock = SimpleNamespace(monotonic=lambda: 0 if next(ticks) <= CASES - len(models) else math.inf)
    monkeypatch.setattr(kernels, "time", clock)
    monkeypatch.setattr(kernels, "MODELS", models)
    for kind in ("Trial", "TrialInTurn"):
        monkeypatch.setattr(kernels, kind, partial(getattr(kernels, kind), seed=1))
    done = CliRunner().invoke(app, ["check", "kernels", "--framework", "keras", "--seconds", "1"])
    platform, header, *lines, verdict = done.stdout.splitlines()
    assert "TensorFlow" in platform and header.split()[0] == "model"
    return done.exit_code, lines, verdict


def counts(line):
    """Cases, rows that changed and calls that differed."""
    return tuple(map(int, line.split()[-3:]))


ONE_OF_A_KIND = ("dense, wide", "dense, several positions", "embedding, pooling", "trained recurrence")


@pytest.mark.parametrize(
    "names", [ONE_OF_A_KIND, pytest.param(tuple(kernels.MODELS), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_line_for_each_model_and_nothing_changes(names, engines, monkeypatch):
    models = {name: kernels.MODELS[name] for name in names} | repeated(engines, "trained recurrence")
    code, lines, verdict = tried(models, monkeypatch)
    in_rows = CASES - CASES // len(names)
    assert code == 0 and verdict == KEPT.format(in_rows, CASES)
    for name, line in zip(names, lines, strict=True):
        assert line.startswith(name) and counts(line) == (CASES / len(names), 0, 0)
    for kernel in ("outer", "gram", "whole", "embedding", "in turn"):
        assert any(kernel in line for line in lines)


def test_a_layer_that_adds_a_batch_mean_is_reported(engines, monkeypatch):
    monkeypatch.setattr(checks, "prove", lambda *_: None)
    monkeypatch.setattr(in_rows, "prove", lambda *_: None)
    monkeypatch.setattr(in_rows, "labels", lambda *given: [in_rows.Rows(0) for _ in given[-1]])
    coupled = {"coupled": (lambda: small(keras.layers.Dense(4), BatchMean()), 1, 1)}
    code, (first, second), verdict = tried(repeated(engines, "twin") | coupled, monkeypatch)
    assert code == FAILED and verdict == BROKEN
    assert counts(first)[1:] == (0, 0) and counts(second)[1] > 0 == counts(second)[2]


@pytest.mark.parametrize("of_sums", [True, False])
def test_equal_calls_that_differ_are_reported(of_sums, engines, monkeypatch):
    """The second of three calls has another sum, or other norms: the first and the third are equal."""
    with_held = in_rows.InRows.with_held

    def unsteady(engine):
        graph, number = with_held(engine), itertools.count()

        def call(*given):
            found, held = graph(*given)
            if next(number) % 3 != 1:
                return found, held
            if of_sums:
                (first, *sums), *counted = found
                return ([first + 1, *sums], *counted), held
            return found, [*held[:-1], tf.zeros_like(held[-1])]

        call.structured_input_signature = graph.structured_input_signature
        return call

    monkeypatch.setattr(in_rows.InRows, "with_held", unsteady)
    code, (line,), verdict = tried(repeated(engines, "twin"), monkeypatch)
    cases, changed, differed = counts(line)
    assert code == FAILED and verdict == BROKEN and cases == CASES and changed == 0 < differed


@pytest.mark.parametrize(("until", "cases"), [(0, 1), (5, 6)])
def test_it_stops_when_the_time_is_up(until, cases, engines, monkeypatch):
    """The first case comes in any case, and a second passes before each of the others."""
    monkeypatch.setattr(kernels, "MODELS", repeated(engines, "twin"))
    monkeypatch.setattr(kernels, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    assert kernels.tried(until)["twin"].cases == cases


def test_turns_that_differ_are_reported(engines, monkeypatch):
    computed, number = in_turn.InTurn.__call__, itertools.count()

    def unsteady(engine, *given):
        found = computed(engine, *given)
        return found._replace(arrays=[array + next(number) for array in found.arrays])

    monkeypatch.setattr(in_turn.InTurn, "__call__", unsteady)
    code, (line,), verdict = tried(repeated(engines, "trained recurrence"), monkeypatch)
    assert code == FAILED and verdict == BROKEN and counts(line)[2] == CASES
