"""Row isolation of kernels, and times and memory of DP-SGD steps, on a device, in Keras and in PyTorch.

python benchmarks/gpu.py [--device cuda|cpu] [--framework keras|torch] [--seconds S]

Each framework has a process of its own. It begins with the trials of `cloister check kernels`: if a row changes or a
call differs there, the times below are of steps without a guarantee. On a CPU batches have an eighth of the examples.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from common import extra_peak, table
from dpsgd import CASES, CLIP, MULTIPLIER, RATE, compiled_step, examples, keras_model, torch_model
from machine import machine

HEAD = ("framework", "model", "computed", "plain, ms", "DP-SGD, ms", "ratio", "extra MB", "error of the sum")
FRAMEWORKS = ("keras", "torch")
REPEATS, LONGEST = 20, 8.0
"""Most repeats of a step, and the seconds after which there are no more."""
WIDE = 1e6
"""A bound that clips nothing."""
Row = list[str]


def milliseconds(step: Callable[[], object], wait: Callable[[], None]) -> float:
    """Return the median time of a step, without its first two."""
    taken, begun = [], time.perf_counter()
    while len(taken) < REPEATS + 2 and (len(taken) < 3 or time.perf_counter() - begun < LONGEST):
        start = time.perf_counter()
        step()
        wait()
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken[2:])


def error(found: Any, expected: Any) -> float:
    """Return the relative error of a sum of gradients."""
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(found, expected, strict=True)]
    return float(np.sqrt(sum(np.square(a - b).sum() for a, b in pairs) / sum(np.square(b).sum() for _, b in pairs)))


def row(framework: str, case: str, private: Any, plain: float, ours: float, extra: float, wrong: float) -> Row:
    """Return the cells of a model."""
    cells = [framework, case, private.method, f"{plain:.1f}", f"{ours:.1f}", f"{ours / plain:.1f}", f"{extra:.0f}"]
    return [*cells, "has dropout" if math.isnan(wrong) else f"{wrong:.0e}"]


def of_keras(device: str, seconds: float, cases: dict[str, tuple[str, int]]) -> Iterator[Row]:
    """Yield the rows of Keras, after the trials of kernels."""
    import keras
    import tensorflow as tf

    if device == "cpu":
        tf.config.set_visible_devices([], "GPU")
    for gpu in tf.config.list_physical_devices("GPU") if device != "cpu" else []:
        tf.config.experimental.set_memory_growth(gpu, True)
    from cloister.audits import keras_kernels
    from cloister.audits.kernels import told
    from cloister.privacy.dpsgd.step import DpSgd

    print(keras_kernels.platform_name(), *told(keras_kernels.tried(time.monotonic() + seconds)), sep="\n", flush=True)

    def extra(action: Callable[[], object]) -> float:
        if device == "cpu":
            return extra_peak(action) / 1e6
        tf.config.experimental.reset_memory_stats("GPU:0")
        before = tf.config.experimental.get_memory_info("GPU:0")["current"]
        action()
        return (tf.config.experimental.get_memory_info("GPU:0")["peak"] - before) / 1e6

    loss = keras.losses.sparse_categorical_crossentropy
    for case, (kind, batch) in cases.items():
        x, y = examples(kind, batch)
        model, plain = keras_model(kind), compiled_step(keras_model(kind), loss, x, y)
        private = DpSgd(
            model,
            batch_size=batch,
            noise_multiplier=MULTIPLIER,
            clipping_norm=CLIP,
            optimizer=keras.optimizers.SGD(RATE),
        )
        wrong = math.nan
        if kind != "mri":
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(loss(y, model(x, training=True)))
            wrong = error(private.clipped_sum(x, y, WIDE).sums, tape.gradient(total, model.trainable_variables))
        times = [
            milliseconds(step, tf.test.experimental.sync_devices)
            for step in (plain, lambda private=private, x=x, y=y: private.step(x, y))
        ]
        yield row("keras", case, private, *times, extra(lambda private=private, x=x, y=y: private.step(x, y)), wrong)


def of_torch(device: str, seconds: float, cases: dict[str, tuple[str, int]]) -> Iterator[Row]:
    """Yield the rows of PyTorch, after the trials of kernels."""
    import torch
    from torch.nn.functional import cross_entropy

    from cloister.audits import torch_kernels
    from cloister.audits.kernels import told
    from cloister.privacy.dpsgd.torch_step import TorchDpSgd

    tried = torch_kernels.tried(time.monotonic() + seconds, device)
    print(torch_kernels.platform_name(device), *told(tried), sep="\n", flush=True)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def extra(action: Callable[[], object]) -> float:
        if device != "cuda":
            return extra_peak(action) / 1e6
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return (torch.cuda.max_memory_allocated() - before) / 1e6

    for case, (kind, batch) in cases.items():
        images, y = examples(kind, batch)
        x = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        plain, module = torch_model(kind).to(device), torch_model(kind).to(device)
        optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
        inputs, labels = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
        private = TorchDpSgd(
            module,
            batch_size=batch,
            noise_multiplier=MULTIPLIER,
            clipping_norm=CLIP,
            optimizer=torch.optim.SGD(module.parameters(), lr=RATE),
            loss=lambda y, outputs: cross_entropy(outputs, y, reduction="none"),
            probe=(x[:3], y[:3]),
        )

        def step(plain: Any = plain, optimizer: Any = optimizer, inputs: Any = inputs, labels: Any = labels) -> None:
            optimizer.zero_grad()
            cross_entropy(plain(inputs), labels).backward()
            optimizer.step()

        wrong = math.nan
        if kind != "mri":
            total = cross_entropy(module(inputs), labels, reduction="sum")
            expected = [own.cpu() for own in torch.autograd.grad(total, list(module.parameters()))]
            wrong = error(private.clipped_sum(x, y, WIDE).sums, expected)
        times = [milliseconds(each, wait) for each in (step, lambda private=private, x=x, y=y: private.step(x, y))]
        yield row("torch", case, private, *times, extra(lambda private=private, x=x, y=y: private.step(x, y)), wrong)


def main() -> None:
    """Run a process for each framework, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="")
    parser.add_argument("--seconds", type=float, default=40, help="of each framework's trials of kernels")
    parser.add_argument("--as-rows", choices=FRAMEWORKS, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rows:
        share = 8 if options.device == "cpu" else 1
        cases = {f"{kind}, B {batch // share}": (kind, batch // share) for kind, batch in CASES.values()}
        make = of_keras if options.as_rows == "keras" else of_torch
        for cells in make(options.device, options.seconds, cases):
            print(json.dumps(cells), flush=True)
        return
    machine()
    rows: list[Row] = []
    for framework in [options.framework] if options.framework else FRAMEWORKS:
        command = [sys.executable, __file__, "--device", options.device, "--seconds", str(options.seconds)]
        # cuBLAS repeats its results with this setting alone, and it is read when PyTorch starts.
        environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TF_CPP_MIN_LOG_LEVEL": "3"} | dict(os.environ)
        with subprocess.Popen([*command, "--as-rows", framework], env=environment, stdout=subprocess.PIPE) as process:
            for line in map(bytes.decode, process.stdout or ()):
                if line.startswith("["):
                    rows.append(json.loads(line))
                else:
                    print(line, end="", flush=True)
        if process.returncode:
            sys.exit(process.returncode)
    print()
    table(HEAD, rows)


if __name__ == "__main__":
    main()
