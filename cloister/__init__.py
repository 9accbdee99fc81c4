"""Cloister: private federated learning on Flower that people can deploy.

Everything that a user needs can be imported from here. It is imported when it is asked for: a node that trains in NumPy
never imports TensorFlow, and a command that only reads a ledger imports neither.
"""

from importlib import import_module
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

_HOMES = {
    "aggregation": "GlobalDP LaplaceClustering MetricDP PrivateStrategy",
    "audits.conformance": "check_mechanism",
    "audits.epsilon": "try_to_tell",
    "audits.sensitivity": "leave_one_out",
    "config.run": "RunConfig parse",
    "core.capabilities": "Capabilities",
    "core.errors": "CloisterError",
    "local.simulation": "simulate",
    "privacy.accounting.account": "Account",
    "privacy.accounting.budget": "PrivacyBudget",
    "privacy.accounting.ledger": "Ledger",
    "privacy.claims.claim": "Claim",
    "privacy.dpsgd.step": "DpSgd",
    "privacy.mechanisms.clipping": "AdaptiveClip clip",
    "privacy.mechanisms.distance": "Distance",
    "privacy.mechanisms.laplace": "LaplaceNoise",
    "privacy.mechanisms.mechanism": "Contributions Mechanism Released",
    "privacy.mechanisms.noise": "GaussianNoise",
    "privacy.mechanisms.release": "bounded_sum noisy_mean",
    "tasks.base": "Dataset Examples Recipe Task",
    "tasks.keras_model": "KerasModel",
    "tasks.numpy_model": "NumpyModel",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    """Import what is asked for by name."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cloister' has no attribute {name!r}")
    return getattr(import_module(f"cloister.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
