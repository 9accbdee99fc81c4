"""Registry of learning problems: data, models, training defaults and scores. A task is imported on first use."""

from cloister.core.registry import Registry

TASKS = Registry(
    "task",
    "cloister.tasks",
    {
        "alzheimer-mri": "cloister.tasks.alzheimer_mri:AlzheimerMri",
        "breast-cancer": "cloister.tasks.breast_cancer:BreastCancer",
        "digits": "cloister.tasks.digits:Digits",
        "emnist": "cloister.tasks.emnist:Emnist",
        "heart-disease": "cloister.tasks.heart_disease:HeartDisease",
        "hospital-charges": "cloister.tasks.hospital_charges:HospitalCharges",
        "linear": "cloister.tasks.linear:Linear",
        "mnist": "cloister.tasks.mnist:Mnist",
        "mnist-writers": "cloister.tasks.mnist_writers:MnistWriters",
    },
)
"""All tasks: built in, or installed as plugins."""
