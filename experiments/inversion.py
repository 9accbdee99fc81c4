"""At which noise can an image no longer be read from one training step? Deep leakage from gradients and inverting
gradients, on digits, MNIST and EMNIST, through every mechanism that a client or a server has.

A client of one image, one step, and a small network of sigmoid units: see docs/audits.md. A task's result is written as
soon as it is there, and is not computed again.

    python experiments/inversion.py [--tasks digits mnist emnist] [--data FOLDER] [--images 2] [--results FOLDER]

The folder of data holds `mnist/mnist.npz` and `emnist-byclass-test/emnist_byclass_test.npz`.
"""

import json
from pathlib import Path

import numpy as np
from cells import data_at, in_turn, parser
from rich.console import Console
from rich.table import Table

from cloister.audits.audit import Effort
from cloister.audits.findings import image_table
from cloister.audits.gradient_inversion import (
    Channel,
    Step,
    attacked,
    locally_noised,
    open_channel,
    published_laplace,
    released_by,
    rows_of,
    with_dp_sgd,
)
from cloister.config.run import parse
from cloister.privacy.mechanisms.gaussian import global_dp
from cloister.privacy.mechanisms.local import LocalGaussian
from cloister.tasks import TASKS
from cloister.tasks.keras_model import import_keras

PLACES = {"digits": "", "mnist": "mnist", "emnist": "emnist-byclass-test"}
"""Folders of the data."""
SECONDS = {"digits": 180.0, "mnist": 600.0, "emnist": 600.0}
"""Seconds of an image in the first estimate, on two cores; those of MNIST and EMNIST are guesses."""
MULTIPLIERS = (1e-3, 1e-1, 1.0, 3.0, 10.0)
"""ν."""
CLIP, RATE = 1.0, 0.1
"""Of updates and gradients; of the step."""
CLIENTS = 10


def channels(model: object) -> dict[str, Channel]:
    """Everything that a step can go through, by name."""
    found: dict[str, Channel] = {"no privacy": open_channel}
    for multiplier in MULTIPLIERS:
        found[f"Laplace, whole, ν = {multiplier:g}"] = published_laplace(multiplier)
        found[f"Laplace, per layer, ν = {multiplier:g}"] = published_laplace(multiplier, per_layer=True)
    for multiplier in (0.001, 0.1):
        found[f"local Gaussian, z = {multiplier:g}"] = locally_noised(LocalGaussian(CLIP, multiplier))
        found[f"DP-SGD, σ = {multiplier:g}"] = with_dp_sgd(multiplier, CLIP, model)
        mechanism = global_dp(noise_multiplier=multiplier, clipping_norm=CLIP)
        found[f"global DP, z = {multiplier:g}, {CLIENTS} clients"] = released_by(mechanism, CLIENTS)
    return found


def attack(name: str, data: str, images: int, picture: Path) -> dict[str, object]:
    """Attack the first images of a task, each of another class, and draw what came of it."""
    from cloister.audits.keras_inversion import Victim

    place = {"task.data-path": data_at(f"{data}/{PLACES[name]}", name)} if PLACES[name] else {}
    task = TASKS.load(name)(parse({"task.name": name} | place).task)
    train, victim = task.load().train, Victim(task.image_shape, task.classes, 0)
    first = np.sort(np.unique(train.y, return_index=True)[1])[:images]
    chosen = [(train.x[number].reshape(task.image_shape).astype(np.float64), int(train.y[number])) for number in first]
    steps = [Step(victim.arrays, victim.gradient(image, label), image, label, RATE) for image, label in chosen]
    found = attacked(victim, steps, channels(victim.model), Effort())
    image_table(picture, rows_of(steps, found))
    similar = {
        attack: {channel: [round(likeness, 4) for likeness, _ in results] for channel, results in each.items()}
        for attack, each in found.items()
    }
    parameters = sum(array.size for array in victim.arrays.values())
    return {"task": name, "parameters": parameters, "pixels": int(np.prod(task.image_shape)), "ssim": similar}


def show(result: dict, console: Console) -> None:
    """A table of one task."""
    table = Table(title=f"{result['task']}: SSIM of {result['pixels']} pixels, {result['parameters']} parameters")
    for column in ("channel", *result["ssim"]):
        table.add_column(column)
    for channel in next(iter(result["ssim"].values())):
        table.add_row(channel, *(f"{np.mean(each[channel]):.2f}" for each in result["ssim"].values()))
    console.print(table)


def main() -> None:
    """Attack each task that has no result yet."""
    options = parser(__doc__, ["mnist", "emnist"])
    options.add_argument("--tasks", nargs="+", choices=PLACES, default=list(PLACES))
    options.add_argument("--images", type=int, default=2)
    options.add_argument("--again", action="store_true", help="compute what is there already")
    asked = options.parse_args()
    place = asked.results / "inversion"
    left = [name for name in asked.tasks if asked.again or not (place / f"{name}.json").exists()]
    for name in in_turn(left, asked.images, SECONDS.__getitem__):
        import_keras()
        place.mkdir(parents=True, exist_ok=True)
        found = attack(name, asked.data, asked.images, place / f"{name}.png")
        (place / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    for name in asked.tasks:
        show(json.loads((place / f"{name}.json").read_text()), Console(width=110))


if __name__ == "__main__":
    main()
