"""Trainers for `privacy.client = "dp-sgd"`, by the kind of model they train.

They are trainers like the others, made with the run's `privacy.*` and the most examples of a unit as well.
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
