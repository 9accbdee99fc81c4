"""Several models in one record."""

import numpy as np
import pytest
from support import failures, random_models

from cloister.utils.arrays import stacked, unstacked
from cloister.utils.errors import FederationError


def test_models_come_back_in_their_order():
    def check(count):
        models = random_models(count)
        back = unstacked(stacked(models))
        assert len(back) == count and all(list(model) == list(models[0]) for model in back)
        for model, other in zip(models, back, strict=True):
            for name, array in model.items():
                np.testing.assert_array_equal(array, other[name])

    assert failures([1, 2, 11], check) == []


def test_an_array_may_have_a_path_for_a_name():
    (model,) = unstacked(stacked([{"dense/kernel/0": np.ones(2)}]))
    assert list(model) == ["dense/kernel/0"]


ONE = np.ones(2)


def test_what_holds_no_hypotheses_is_refused():
    def check(arrays):
        with pytest.raises(FederationError, match="hypotheses 0 to k - 1"):
            unstacked(arrays)

    cases = [
        {},
        {"kernel": ONE},
        {"0/kernel": ONE, "kernel": ONE},
        {"1/kernel": ONE},
        {"0/kernel": ONE, "2/kernel": ONE},
        {"0/kernel": ONE, "1/kernel": ONE, "1/bias": ONE},
        {"0/kernel": ONE, "1/bias": ONE},
        {"00/kernel": ONE},
    ]
    assert failures(cases, check) == []
