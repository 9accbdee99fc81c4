"""Trainers for `privacy.client = "dp-sgd"`, by the kind of model they train.

Their constructors also take the run's `privacy.*` and the largest number of a unit's examples.
"""

from cloister.core.registry import Registry

PRIVATE_TRAINERS = Registry(
    "DP-SGD trainer",
    "cloister.dp_sgd_trainers",
    {
        "keras": "cloister.client.training.dp_sgd_keras_trainer:PrivateKerasTrainer",
        "numpy": "cloister.client.training.dp_sgd_numpy_trainer:PrivateNumpyTrainer",
    },
)
