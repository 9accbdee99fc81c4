"""Registry of learning problems: data, models, training defaults and scores. A task is imported on first use."""

from cloister.utils.registry import Registry

TASKS = Registry(
    "task",
    "cloister.tasks",
    {
        "alzheimer-mri": "cloister.tasks.datasets.alzheimer_mri:AlzheimerMri",
        "breast-cancer": "cloister.tasks.datasets.patients:BreastCancer",
        "digits": "cloister.tasks.datasets.characters:Digits",
        "emnist": "cloister.tasks.datasets.characters:Emnist",
        "femnist": "cloister.tasks.datasets.characters:Femnist",
        "heart-disease": "cloister.tasks.datasets.patients:HeartDisease",
        "hospital-charges": "cloister.tasks.datasets.regressions:HospitalCharges",
        "linear": "cloister.tasks.datasets.regressions:Linear",
        "mnist": "cloister.tasks.datasets.characters:Mnist",
        "mnist-writers": "cloister.tasks.datasets.characters:MnistWriters",
    },
    "task.name",
)
"""All tasks: built in, or installed as plugins."""
