"""Bounds in a few digits, which say no more than they do, wherever one is printed."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from reported import DP_SGD, LEDGER, OF_ALL, OF_RUN, PARAMETERS, SOUND, line, write_run
from support import failures
from typer.testing import CliRunner

from cloister.cli import app
from cloister.client.policy import Policy
from cloister.client.policy import render as render_policy
from cloister.privacy.accounting.events import Gaussian, Pure
from cloister.privacy.claims.claim import OfSize, Statement
from cloister.privacy.claims.render import contract, meanings, render, render_resumed
from cloister.privacy.claims.to_json import record
from cloister.server.reports import status
from cloister.server.reports.html.page import write_report
from cloister.utils.text import at_least, at_most, rounded_up

EPSILON, MULTIPLIER = 1.2341049, 1.5678951
"""To the nearest in three to six digits, the one is less than it is, and the other more."""
ROUNDED = re.compile(r"\b1\.234?(10?|105)?\b(?!\d)|\b1\.5679\d*|\b1\.568\b|\b1\.57\b")
"""Any of these is a bound that does not hold."""


def test_a_bound_is_on_its_side_and_near():
    def check(digits):
        rng = np.random.default_rng(digits)
        for value in rng.uniform(1, 10, 300) * 10.0 ** rng.integers(-30, 30, 300):
            high, low = float(at_most(value, digits)), float(at_least(value, digits))
            assert low <= value <= high and high - low <= 10.0 ** (1 - digits) * value * (1 + 1e-9)

    assert failures([1, 3, 4, 6], check) == []


def test_what_is_rounded_up_is_no_less_and_near():
    def check(digits):
        rng = np.random.default_rng(digits)
        few = rng.integers(1, 10**digits, 300) * 10.0 ** rng.integers(-9, 9, 300)
        for value in rng.uniform(1, 10, 300) * 10.0 ** rng.integers(-30, 30, 300):
            assert value <= rounded_up(value, digits) <= (1 + 10.0 ** (1 - digits)) * value
        for value in (float(f"{each:.{digits}g}") for each in few):
            assert rounded_up(value, digits) == value
            assert value < rounded_up(math.nextafter(value, math.inf), digits)

    assert failures([1, 3, 4], check) == []


def test_what_is_short_already_stays_as_it_is():
    def check(value, shown):
        assert at_most(value) == at_least(value) == shown

    cases = [(0.0, "0"), (0.1, "0.1"), (3 * 0.1, "0.3"), (8, "8"), (100 * 0.07, "7"), (1e-5, "1e-05"), (1 - 2e-11, "1")]
    assert failures(cases, check) == []


def test_what_has_no_bound_has_none_in_print():
    assert at_most(None) == at_most(math.inf) == at_least(math.inf) == "inf"


def shows(text):
    """Return the parts of a text that bound neither of the two numbers, which it must contain."""
    assert "1.235" in text or "1.24" in text or "1.2342" in text or "1.23411" in text, text
    return ROUNDED.findall(text)


def written(folder):
    """A run that claims this ε, by this noise, and has spent a little more than a third of its budget."""
    figures = [replace(figure, epsilon=EPSILON) for figure in (OF_RUN, OF_ALL)]
    kept = replace(OF_ALL, epsilon=EPSILON, budget=True, filter="f", spent=0.1, accountant=None)
    sizes = tuple(OfSize(size, 3, (replace(DP_SGD.sizes[0].figures[0], epsilon=EPSILON),)) for size in (64, 80))
    parameters = PARAMETERS | {"privacy.noise-multiplier": MULTIPLIER}
    claim = replace(SOUND, figures=(*figures, kept), parameters=parameters)
    said = Statement(claim, 3, "fixed", LEDGER, replace(DP_SGD, sizes=sizes))
    rounds = [line(number) for number in range(4)]
    for one in rounds[1:]:
        one["measured"] |= {"epsilon": EPSILON, "noise_multiplier": MULTIPLIER}
    ended = {"ended": {"how": "as-asked", "why": ""}}
    return said, write_run(folder, rounds=rounds, privacy=record(said) | ended)


class TestInPrint:
    def test_of_a_claim(self, tmp_path):
        said, _ = written(tmp_path)
        for told in (
            *render(said)[1:4],
            contract(said.claim, EPSILON),
            render_resumed(EPSILON, 0.0)[0],
            *(meaning.how_much for meaning in meanings(said)),
        ):
            assert not shows(told), told

    def test_of_a_run_in_its_directory(self, tmp_path):
        _, place = written(tmp_path)
        assert not shows("\n".join(status.told(status.run_state(place), None)))
        assert str(EPSILON) in (place / "privacy.json").read_text(), "programs read it exactly"

    @pytest.mark.slow
    def test_of_a_page_and_a_comparison(self, tmp_path):
        _, place = written(tmp_path / "a")
        page = write_report(place).read_text()
        assert not shows(re.sub(r"<[^>]*>|[MLC][\d. -]*", " ", page))
        compared = CliRunner().invoke(app, ["compare", str(place), str(written(tmp_path / "b")[1])])
        assert not shows(compared.output)

    def test_of_releases(self):
        assert str(Gaussian(MULTIPLIER)) == "gaussian, z = 1.567" and str(Pure(EPSILON)) == "pure, ε = 1.235"

    def test_of_a_policy(self):
        rules = {"mechanisms": ["gaussian"], "tasks": ["digits"], "min_gaussian_noise_multiplier": MULTIPLIER}
        told = render_policy(Policy(**rules, max_epsilon=EPSILON, max_example_epsilon=EPSILON))
        assert not shows(" ".join(told)) and "gaussian with at least 1.56789" in told[1]
