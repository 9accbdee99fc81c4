"""The configuration that is shipped, and what is said of a bad one."""

import inspect
import tomllib
from pathlib import Path

import pytest

from cloister.config.run import flatten, parse
from cloister.strategies import STRATEGIES
from cloister.utils.errors import ConfigError

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def shipped():
    """`[tool.flwr.app.config]` as Flower hands it over."""
    return flatten(tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"])


def options_of(name):
    """The keyword options of a built-in strategy, as they are written in a configuration."""
    parameters = inspect.signature(STRATEGIES.load(name)).parameters.values()
    return {p.name.replace("_", "-") for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def refusal(**keys):
    """Return the error about a bad configuration; dots and dashes of the keys are written `__` and `_`."""
    flat = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    with pytest.raises(ConfigError) as caught:
        parse(flat)
    return str(caught.value)
