"""A step of DP-SGD, beside a plain step of the same model in the same process.

python benchmarks/dpsgd.py [--repeats N] [--only CASE] [--vectorized-map] [--memory] [--opacus PYTHON] [--baseline PATH]

`--baseline` takes steps of this checkout and of another in turns, over the same Poisson batches, as trainers draw them.
Each checkout has a process of its own. It gives the ratio of their processor times.

`--opacus` runs this script once more, with the interpreter of an environment that has torch and Opacus: our steps on a
module of torch and their ghost clipping, beside torch's own plain step.
"""

import argparse
import gc
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from machine import load, machine

CASES = {
    "MLP, B 100": ("mlp", 100),
    "MLP, B 600": ("mlp", 600),
    "MNIST CNN, B 100": ("cnn", 100),
    "MRI CNN, B 32": ("mri", 32),
}
TARGETS = dict(zip(CASES, (2.0, 1.5, 1.9, 1.25), strict=True))
"""Of the plain step, on an idle machine with numba."""
SHAPES = {"mlp": (28, 28, 1), "cnn": (28, 28, 1), "mri": (128, 128, 1)}
CLASSES = {"mlp": 10, "cnn": 10, "mri": 4}
RATE, CLIP, MULTIPLIER = 0.02, 1.0, 1.0

Steps = Mapping[str, Callable[[], object]]


def examples(kind: str, batch: int) -> tuple[Any, Any]:
    """A batch of random pictures and labels."""
    rng = np.random.default_rng(0)
    return rng.random((batch, *SHAPES[kind]), np.float32), rng.integers(0, CLASSES[kind], batch)


def seconds(steps: Steps, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of every step in every round, and processor seconds of all threads together.

    Steps take turns, so that a slow moment of the machine hits all of them. Processor time is what is left to compare
    where other programs run.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(repeats + 2):
        for name, step in steps.items():
            gc.disable()
            start, busy = time.perf_counter(), time.process_time()
            step()
            elapsed = time.perf_counter() - start, time.process_time() - busy
            gc.enable()
            if turn > 1:
                taken[name].append(elapsed)
    return taken


def report(case: str, taken: Mapping[str, list[tuple[float, float]]], target: float) -> None:
    """Times, and ratios to the first of the steps."""
    plain = next(iter(taken.values()))
    for name, own in taken.items():
        ratios = [statistics.median(a[0] / b[0] for a, b in zip(own, plain, strict=True))]
        for kind in (0, 1):
            mine, theirs = ([times[kind] for times in several] for several in (own, plain))
            ratios += [statistics.median(mine) / statistics.median(theirs), min(mine) / min(theirs)]
        wanted = f" target {target}" if name == "Cloister" else ""
        print(
            f"{case:17} {name:24} {1e3 * statistics.median(times[0] for times in own):8.2f} ms; median round "
            f"{ratios[0]:.2f}x, medians {ratios[1]:.2f}x, fastest {ratios[2]:.2f}x; processor time: "
            f"{1e3 * statistics.median(times[1] for times in own):.2f} ms, medians {ratios[3]:.2f}x, least "
            f"{ratios[4]:.2f}x; load {load()}{wanted}"
        )
    sys.stdout.flush()


def keras_steps(kind: str, batch: int, vectorized: bool) -> dict[str, Callable[[], object]]:
    """A plain step, ours, and what else TensorFlow offers."""
    ours = private(kind, batch)
    x, y = examples(kind, batch)
    steps = {
        "plain Keras": plain_step(kind, batch),
        "Cloister": lambda: ours.step(x, y),
        "  its clipped sum alone": lambda: ours.clipped_sum(x, y, CLIP),
    }
    return steps | {"tf.vectorized_map": vectorized_step(kind, batch)} if vectorized else steps


def plain_step(kind: str, batch: int) -> Callable[[], object]:
    """What a ratio is to: compiled, without XLA."""
    import keras

    return compiled_step(keras_model(kind), keras.losses.sparse_categorical_crossentropy, *examples(kind, batch))


def compiled_step(model: Any, loss: Callable[[Any, Any], Any], x: Any, y: Any) -> Callable[[], object]:
    """Take a plain step of any model; x and y are arrays, or tuples or dicts of them."""
    import keras
    import tensorflow as tf

    optimizer = keras.optimizers.SGD(RATE)
    optimizer.build(model.trainable_variables)
    x, y = tf.nest.map_structure(tf.constant, (x, y))

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(loss(y, model(x, training=True)))
        optimizer.apply(tape.gradient(mean, model.trainable_variables), model.trainable_variables)

    return lambda: step(x, y)


def private(kind: str, batch: int) -> Any:
    """Ours."""
    import keras

    from cloister.privacy.dpsgd.step import DpSgd

    return DpSgd(
        keras_model(kind),
        batch_size=batch,
        noise_multiplier=MULTIPLIER,
        clipping_norm=CLIP,
        optimizer=keras.optimizers.SGD(RATE),
    )


def vectorized_step(kind: str, batch: int) -> Callable[[], object]:
    """Per-example gradients of the whole model, and TensorFlow's noise."""
    import keras
    import tensorflow as tf

    model, optimizer = keras_model(kind), keras.optimizers.SGD(RATE)
    x, y = (tf.constant(array) for array in examples(kind, batch))
    optimizer.build(model.trainable_variables)

    def of_one(example: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(
                keras.losses.sparse_categorical_crossentropy(example[1][None], model(example[0][None]))
            )
        return tape.gradient(loss, model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any) -> None:
        gradients = tf.vectorized_map(of_one, (x, y))
        norms = tf.sqrt(tf.add_n([tf.reduce_sum(tf.reshape(g, [g.shape[0], -1]) ** 2, axis=1) for g in gradients]))
        factors = CLIP / tf.maximum(norms, CLIP)
        means = [
            (tf.tensordot(factors, g, 1) + tf.random.normal(g.shape[1:], stddev=MULTIPLIER * CLIP)) / len(norms)
            for g in gradients
        ]
        optimizer.apply(means, model.trainable_variables)

    return lambda: step(x, y)


def keras_model(kind: str) -> Any:
    """The models of the tasks."""
    import keras

    from cloister.tasks.datasets.characters import mnist_cnn, mnist_mlp

    if kind != "mri":
        return {"mlp": mnist_mlp, "cnn": mnist_cnn}[kind]()
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(SHAPES["mri"]),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(128, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.1),
            layers.Dense(32, activation="relu"),
            layers.Dropout(0.1),
            layers.Dense(4, activation="softmax"),
        ]
    )


def torch_model(kind: str) -> Any:
    """The same models in torch."""
    from torch import nn

    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10))
    if kind == "cnn":
        return nn.Sequential(
            *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)),
        )
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3), nn.ReLU(), nn.Flatten(), nn.Linear(100352, 64), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)),
    )


def opacus_steps(kind: str, batch: int, vectorized: bool) -> dict[str, Callable[[], object]]:
    """A plain step of torch, ours, one with Opacus' ghost clipping, and the clipped sum by `torch.func.vmap`."""
    import torch
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    images, labels = examples(kind, batch)
    x, y = torch.tensor(images).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)
    plain = torch_model(kind)
    optimizer, criterion = torch.optim.SGD(plain.parameters(), lr=RATE), torch.nn.CrossEntropyLoss()
    module = GradSampleModuleFastGradientClipping(torch_model(kind), max_grad_norm=CLIP, use_ghost_clipping=True)
    private = DPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), lr=RATE),
        noise_multiplier=MULTIPLIER,
        max_grad_norm=CLIP,
        expected_batch_size=batch,
    )
    private_criterion = DPLossFastGradientClipping(module, private, torch.nn.CrossEntropyLoss())

    def step(model: Any, optimizer: Any, criterion: Any) -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    ours, given = private_torch(kind, batch), x.numpy()
    steps: dict[str, Callable[[], object]] = {
        "plain torch": lambda: step(plain, optimizer, criterion),
        "Cloister": lambda: ours.step(given, labels),
        "  its clipped sum alone": lambda: ours.clipped_sum(given, labels, CLIP),
        "Opacus ghost": lambda: step(module, private, private_criterion),
    }
    return steps | {"torch.func.vmap": lambda: vectorized_sum(plain, x, y)} if vectorized else steps


def private_torch(kind: str, batch: int) -> Any:
    """Ours, of a module of torch."""
    import torch

    from cloister.privacy.dpsgd.torch_step import TorchDpSgd

    module, (images, labels) = torch_model(kind), examples(kind, batch)
    return TorchDpSgd(
        module,
        batch_size=batch,
        noise_multiplier=MULTIPLIER,
        clipping_norm=CLIP,
        optimizer=torch.optim.SGD(module.parameters(), lr=RATE),
        loss=lambda y, outputs: torch.nn.functional.cross_entropy(outputs, y, reduction="none"),
        probe=(images[:3].transpose(0, 3, 1, 2), labels[:3]),
    )


def vectorized_sum(module: Any, x: Any, y: Any) -> Any:
    """The clipped sum of the gradients of single examples, all of which it makes."""
    import torch

    def loss(values: Any, one: Any, label: Any) -> Any:
        scores = torch.func.functional_call(module, values, (one[None],))
        return torch.nn.functional.cross_entropy(scores, label[None])

    values = {name: own.detach() for name, own in module.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0), randomness="different")(values, x, y)
    norms = torch.stack([own.flatten(1).norm(dim=1) for own in gradients.values()]).norm(dim=0)
    factors = CLIP / norms.clamp(min=CLIP)
    return [torch.einsum("u,u...->...", factors, own) for own in gradients.values()]


def peak(kind: str, batch: int, step: str) -> float:
    """Peak resident GB of a process that takes five steps of one kind."""
    code = f"import dpsgd; dpsgd.take({kind!r}, {batch}, {step!r})"
    path = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1]) / 2**20


def take(kind: str, batch: int, which: str) -> None:
    """Take five steps, and print the peak of this process' resident memory in KiB.

    It is read from the kernel's account of this address space: `ru_maxrss` of a process begins with that of its parent.
    """
    if which == "plain":
        step = plain_step(kind, batch)
    else:
        (x, y), ours = examples(kind, batch), private(kind, batch)
        step = lambda: ours.step(x, y)  # noqa: E731
    for _ in range(5):
        step()
    print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


SERVE = """
import sys, time, cloister, dpsgd, numpy
x, y = dpsgd.examples({kind!r}, {units})
ours, rng = dpsgd.private({kind!r}, {batch}), numpy.random.default_rng(1)
print(cloister.__file__, flush=True)
for _ in sys.stdin:
    drawn = numpy.flatnonzero(rng.random({units}) < {batch} / {units})
    start = time.process_time()
    ours.step(x[drawn], y[drawn])
    print(time.process_time() - start, flush=True)
"""
"""Print where the project lies, then the processor seconds of a step for each line that comes in."""
POPULATION = 10
"""Units that batches are drawn from, in expected batches."""


class Worker:
    """A process that takes steps of the project that lies at a path, when it is told to."""

    def __init__(self, path: Path, kind: str, batch: int) -> None:
        """Start it, and wait until it has taken its first steps."""
        # A checkout's own script knows how its `DpSgd` is made.
        environment = {**os.environ, "PYTHONPATH": str(path / "benchmarks"), "TF_CPP_MIN_LOG_LEVEL": "3"}
        code = SERVE.format(kind=kind, units=POPULATION * batch, batch=batch)
        # Where a process starts is the first place in which it looks for packages.
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        found = Path(self._process.stdout.readline().strip())
        if not found.is_relative_to(path.resolve()):
            raise RuntimeError(f"{found} was imported in the place of what lies in {path}")
        for _ in range(3):
            self.seconds()

    def seconds(self) -> float:
        """Processor seconds of one step."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def stop(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def compare(case: str, kind: str, batch: int, baseline: Path, repeats: int) -> None:
    """Print the ratio of processor times, this checkout's to the other's, with a 95 % interval of its mean."""
    workers = [Worker(path, kind, batch) for path in (Path(__file__).resolve().parents[1], baseline)]
    logs = []
    for turn in range(repeats):
        order = (0, 1) if turn % 2 else (1, 0)
        taken = {which: workers[which].seconds() for which in order}
        logs.append(math.log(taken[0] / taken[1]))
    for worker in workers:
        worker.stop()
    mean, error = statistics.mean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(repeats)
    low, middle, high = (math.exp(value) for value in (mean - error, mean, mean + error))
    print(
        f"{case:17} processor time beside the baseline: {middle:.3f} ({low:.3f} to {high:.3f}); load {load()}",
        flush=True,
    )


def main() -> None:
    """Print ratios, and memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--vectorized-map", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--opacus", default="", metavar="PYTHON")
    parser.add_argument("--baseline", type=Path, metavar="PATH", help="another checkout, to compare with")
    parser.add_argument("--as-opacus", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    machine()
    for case, (kind, batch) in CASES.items():
        if options.only in case:
            repeats = options.repeats if kind == "mlp" else max(5, options.repeats // 4)
            if options.baseline:
                compare(case, kind, batch, options.baseline.resolve(), repeats)
                continue
            steps = (
                opacus_steps(kind, batch, options.vectorized_map)
                if options.as_opacus
                else keras_steps(kind, batch, options.vectorized_map)
            )
            report(case, seconds(steps, repeats), TARGETS[case])
    if options.memory:
        for case, (kind, batch) in CASES.items():
            plain, ours = (peak(kind, batch, step) for step in ("plain", "private"))
            print(f"{case}: peak {plain:.2f} GB plain, {ours:.2f} GB private, {ours - plain:+.2f} GB (target +0.30)")
    if options.opacus:
        command = [options.opacus, __file__, "--as-opacus", "--repeats", str(options.repeats), "--only", options.only]
        command += ["--vectorized-map"] if options.vectorized_map else []
        # Threads of torch that wait in a loop take the processor from each other on a machine with few.
        subprocess.run(command, check=True, env={**os.environ, "OMP_WAIT_POLICY": "passive"})


if __name__ == "__main__":
    main()
