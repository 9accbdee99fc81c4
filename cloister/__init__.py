"""Cloister: private federated learning on Flower that people can deploy.

Everything that a user needs can be imported from here. It is imported when it is asked for: a node that trains in NumPy
never imports TensorFlow, and a command that only reads a ledger imports neither.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cloister.aggregation import GlobalDP as GlobalDP
    from cloister.aggregation import LaplaceClustering as LaplaceClustering
    from cloister.aggregation import MetricDP as MetricDP
    from cloister.aggregation import PrivateStrategy as PrivateStrategy
    from cloister.audits.conformance import check_mechanism as check_mechanism
    from cloister.audits.epsilon import try_to_tell as try_to_tell
    from cloister.audits.sensitivity import leave_one_out as leave_one_out
    from cloister.config.run import RunConfig as RunConfig
    from cloister.config.run import parse as parse
    from cloister.core.capabilities import Capabilities as Capabilities
    from cloister.core.errors import CloisterError as CloisterError
    from cloister.local.simulation import simulate as simulate
    from cloister.privacy.accounting.account import Account as Account
    from cloister.privacy.accounting.budget import PrivacyBudget as PrivacyBudget
    from cloister.privacy.accounting.ledger import Ledger as Ledger
    from cloister.privacy.claims.claim import Claim as Claim
    from cloister.privacy.dpsgd.step import DpSgd as DpSgd
    from cloister.privacy.mechanisms.clipping import AdaptiveClip as AdaptiveClip
    from cloister.privacy.mechanisms.clipping import clip as clip
    from cloister.privacy.mechanisms.distance import Distance as Distance
    from cloister.privacy.mechanisms.laplace import LaplaceNoise as LaplaceNoise
    from cloister.privacy.mechanisms.mechanism import Contributions as Contributions
    from cloister.privacy.mechanisms.mechanism import Mechanism as Mechanism
    from cloister.privacy.mechanisms.mechanism import Released as Released
    from cloister.privacy.mechanisms.noise import GaussianNoise as GaussianNoise
    from cloister.privacy.mechanisms.release import bounded_sum as bounded_sum
    from cloister.privacy.mechanisms.release import noisy_mean as noisy_mean
    from cloister.tasks.base import Dataset as Dataset
    from cloister.tasks.base import Examples as Examples
    from cloister.tasks.base import Recipe as Recipe
    from cloister.tasks.base import Task as Task
    from cloister.tasks.keras_model import KerasModel as KerasModel
    from cloister.tasks.numpy_model import NumpyModel as NumpyModel


def _homes() -> dict[str, str]:
    """The module of each name, read from the imports above: type checkers follow them, and nothing runs them."""
    nodes = ast.walk(ast.parse(Path(__file__).read_text()))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith("cloister.")]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_HOMES = _homes()
__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    """Import what is asked for by name."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cloister' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
