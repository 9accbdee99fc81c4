"""Learning problems by name: data, models, training defaults and scores. Importing this package loads none of them."""

from cloister.core.registry import Registry

TASKS = Registry(
    "task",
    "cloister.tasks",
    {
        "breast-cancer": "cloister.tasks.breast_cancer:BreastCancer",
        "digits": "cloister.tasks.digits:Digits",
        "heart-disease": "cloister.tasks.heart_disease:HeartDisease",
        "mnist": "cloister.tasks.mnist:Mnist",
    },
)
"""Every task, built in or installed beside Cloister."""
