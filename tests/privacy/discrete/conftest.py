"""Fixtures for tests of the exact noise."""

import pytest

from cloister.privacy.mechanisms.discrete import numpy_kernel, sampler


@pytest.fixture(params=["numpy", "numba"])
def kernel(request, monkeypatch):
    """One kernel after the other, in the place of the one that would be chosen."""
    if request.param == "numba":
        pytest.importorskip("numba", reason="the compiled kernel comes with cloister-fl[fast]")
        from cloister.privacy.mechanisms.discrete import numba_kernel as chosen
    else:
        chosen = numpy_kernel
    monkeypatch.setattr(sampler, "kernel", lambda: chosen)
    return chosen
