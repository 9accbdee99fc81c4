"""Records with several models: array `name` of hypothesis j is named `j/name`."""

from collections.abc import Mapping, Sequence

from numpy.typing import NDArray

from cloister.core.errors import FederationError


def stacked(models: Sequence[Mapping[str, NDArray]]) -> dict[str, NDArray]:
    """Return the arrays of several models in one mapping, by hypothesis and name."""
    return {f"{number}/{name}": array for number, model in enumerate(models) for name, array in model.items()}


def unstacked(arrays: Mapping[str, NDArray]) -> list[dict[str, NDArray]]:
    """Return the models in a record: the inverse of `stacked`.

    Raises:
        FederationError: the names are not those of hypotheses 0 to k - 1, all with the same arrays.
    """
    models: dict[str, dict[str, NDArray]] = {}
    for path, array in arrays.items():
        number, _, name = path.partition("/")
        models.setdefault(number, {})[name] = array
    hypotheses = [models.get(str(number), {}) for number in range(len(models))]
    if not hypotheses or any(set(model) != set(hypotheses[0]) or not model for model in hypotheses):
        raise FederationError("the record does not hold hypotheses 0 to k - 1 with the same arrays each")
    return hypotheses
