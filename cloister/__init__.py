"""Cloister: private federated learning on Flower that people can deploy.

Everything that a user needs can be imported from here. It is imported when it is asked for: a node that trains in NumPy
never imports TensorFlow, and a command that only reads a ledger imports neither.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if find_spec("fcntl") is None or not hasattr(os, "posix_fallocate"):
    _REFUSED = "Cloister runs on Linux only; on Windows use it in WSL 2, on macOS in a container or a virtual machine"
    # The command ends with the sentence alone.
    raise SystemExit(_REFUSED) if Path(sys.argv[0]).stem == "cloister" else ImportError(_REFUSED)

__version__ = "0.1.0"

_HOMES = {
    "audits.testing": "check_mechanism leave_one_out try_to_tell",
    "config.run": "RunConfig parse",
    "privacy.accounting.account": "Account",
    "privacy.accounting.budget": "PrivacyBudget",
    "privacy.accounting.ledger": "Ledger",
    "privacy.claims.claim": "Claim",
    "privacy.claims.premises": "CRYPTOGRAPHY Premise",
    "privacy.dpsgd.step": "DpSgd",
    "privacy.mechanisms.clipping": "AdaptiveClip clip",
    "privacy.mechanisms.discrete.sampler": "DiscreteGaussian",
    "privacy.mechanisms.laplace": "LaplaceNoise",
    "privacy.mechanisms.mechanism": "Contributions Mechanism Released",
    "privacy.mechanisms.metric": "Distance",
    "privacy.mechanisms.noise": "GaussianNoise",
    "privacy.mechanisms.release": "bounded_sum noisy_mean",
    "server.clustering": "LaplaceClustering",
    "server.private_strategy": "GlobalDP MetricDP PrivateStrategy",
    "simulation.simulate": "simulate",
    "tasks.base": "Dataset Examples Recipe Task",
    "tasks.keras_model": "KerasModel",
    "tasks.numpy_models": "NumpyModel",
    "tasks.targets": "Target",
    "tasks.torch_model": "TorchModel",
    "tasks.torch_task": "TorchTask",
    "utils.errors": "CloisterError",
    "utils.registry": "Capabilities",
}
"""The names, by the module that each is defined in."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    """Import what is asked for by name."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cloister' has no attribute {name!r}")
    return getattr(import_module(f"cloister.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
