"""The thesis' systems for end-to-end privacy on MNIST: accuracy by rounds, and what is and is not guaranteed.

    python experiments/end_to_end.py SYSTEM --data FOLDER_OF_MNIST_NPZ [--rounds 100] [--clients 100] [--partition iid]
        [--sigma 4] [--model mlp] [--results FOLDER]
    python experiments/end_to_end.py central --data FOLDER_OF_MNIST_NPZ [--epochs 247] [--sigma 4] [--model mlp]
    python experiments/end_to_end.py table

SYSTEM is proposed, curator, naive, none, topped-up or baseline: the configuration of that name in
experiments/end_to_end, on top of common.toml. `-c key=value` overrides it. A result goes to end_to_end of the results,
its command with it. It takes the place of no other command's, and is not run again. The hours that are to come are said
first, and after each round or epoch. `table` writes the thesis' figures beside ours, and draws our curves; those of
results whose `--name` contains `-clip-` beside their clips (figure 4.4).

The runs of 1,000 and 10,000 clients take many hours. A run that was stopped (Ctrl-C, or kill) has a result of its own,
NAME-stopped, until the run has ended. It goes on after its last round when the same command is given again, where no
noise is seeded: proposed, curator and naive need `-c privacy.noise-seed=-1` for that. `central` keeps its weights below
`--output-dir` every ten epochs, and goes on from there with other noise.
"""

import argparse
import json
import shlex
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cells import NONE, SOURCES, parser, write_table
from rich.console import Console

from cloister.server.build import Plan
from cloister.server.reports.console import ConsoleReporter
from cloister.server.round import Round
from cloister.server.run import Outcome
from cloister.utils.errors import CloisterError, ConfigError, DataError

FOLDER = Path(__file__).parent
SYSTEMS = ("proposed", "curator", "naive", "none", "topped-up", "baseline")
MODELS = ("mlp", "cnn")
PARTICIPATION = {100: 0.1, 1000: 0.05, 10000: 0.005}
"""Share of the clients that train in a round, as in the thesis."""
SECONDS = {"mlp": 0.3, "cnn": 4.8}
"""Seconds of a client and a round in the first estimate, by the recorded results (the CNN: one run)."""
BASELINE_SECONDS = {"mlp": 2.0, "cnn": 7.0}
"""The same of `baseline`, whose clients take a hundred times as many steps: by a result, and by a round of the CNN."""
EPOCH = {"mlp": 8.5, "cnn": 30.0}
"""Seconds of an epoch of `central`; that of the CNN is guessed from those of clients."""
PUBLISHED = {
    # Rounds or epochs, and the accuracy after them in percent.
    "baseline-iid-100": (600, 98.30),
    "baseline-shards-100": (600, 97.16),
    "baseline-iid-100-cnn": (600, 99.33),
    "baseline-shards-100-cnn": (600, 99.18),
    "central-sigma-8": (51, 89.63),
    "central": (247, 92.49),
    "central-sigma-2": (730, 95.16),
    "proposed-iid-100-sigma-3": (288, 88.66),
    "proposed-iid-100-sigma-2": (54, 78.73),
    "proposed-shards-100-sigma-3": (288, 87.37),
    "proposed-shards-100-sigma-2": (54, 74.62),
    "proposed-iid-100": (635, 89.08),
    "curator-iid-100": (635, 88.87),
    "naive-iid-100": (635, 14.59),
    "proposed-shards-100": (635, 87.08),
    "curator-shards-100": (635, 81.63),
    "proposed-iid-1000": (1740, 91.86),
    "curator-iid-1000": (1740, 92.11),
    "naive-iid-1000": (1740, 54.86),
    "proposed-shards-1000": (1740, 91.34),
    "curator-shards-1000": (1740, 90.12),
    "proposed-iid-10000": (15000, 96.29),
    "curator-iid-10000": (15000, 95.64),
    "naive-iid-10000": (15000, 81.60),
    "proposed-shards-10000": (15000, 95.73),
    "curator-shards-10000": (15000, 94.78),
}
"""The thesis' tables 4.1 to 4.6, by the names of results. Table 4.3 has σ = 4 after 640 rounds too: 89.45 and 88.19."""
CLIP = ("dp-sgd-clipping-norm", "clipping-decay", "min-clipping-norm")
"""Keys of the clip's course."""
HEAD = ("run", "reported", "ours", "difference in points", "best")
"""Columns of the table."""
CENTRAL = {"noise-multiplier": 4.0, "batch-size": 600, "clipping-norm": 4.0, "learning-rate": 0.02, "seed": 1}
"""Settings of `central`, but for σ those of table 4.2."""
TARGET_EPSILON = {8.0: 0.5, 4.0: 2.0, 2.0: 8.0}
"""Of table 4.2, by σ."""


def settings_of(system: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The dotted keys of a run."""
    from cloister.config.run import flatten

    found: dict[str, Any] = {}
    for name in ("common", system):
        found |= flatten(tomllib.loads((FOLDER / "end_to_end" / f"{name}.toml").read_text()))
    found |= {
        "task.model": arguments.model,
        "strategy.fraction-train": PARTICIPATION[arguments.clients],
        "task.partition": arguments.partition,
        "num-rounds": arguments.rounds,
    }
    if arguments.sigma is not None:
        found["privacy.dp-sgd-noise-multiplier"] = arguments.sigma
    overrides = tomllib.loads("\n".join(arguments.config or []))
    return found | flatten(overrides)


class TimeLeft(ConsoleReporter):
    """Tells a person how long the rounds that are left take. The data is public, so times may be told.

    Args:
        rounds: of the run.
        console: to write on.
        seconds: that a round takes, in the first estimate.
    """

    def __init__(self, rounds: int, console: Console, seconds: float) -> None:
        """Take note of what an estimate needs."""
        super().__init__(rounds, console)
        self.seconds, self.before = seconds, 0

    def opening(self, plan: Plan, *told: Any) -> None:
        """Start the clock, and guess. Of a run that goes on it is not known yet how much is left."""
        super().opening(plan, *told)
        self.start = time.perf_counter()
        if not plan.resumes:
            self.note(hours(self.seconds * self.rounds))

    def resuming(self, last: Round, *told: Any) -> None:
        """Count no round of an earlier process."""
        super().resuming(last, *told)
        self.before = last.number
        self.note(hours(self.seconds * (self.rounds - last.number)))

    def __call__(self, done: Round, arrays: object) -> None:
        """One line for a finished round, and one for those to come."""
        super().__call__(done, arrays)
        if (rounds := done.number - self.before) > 0:
            seconds = (time.perf_counter() - self.start) / rounds
            self.note(hours(seconds * (self.rounds - done.number)))


def hours(seconds: float) -> str:
    """How much is to come, for a person."""
    return f"about {seconds / 3600:.1f} hours to go"


def place_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Where a run's data is and where the run is: a new one, or the one that is there."""
    name = arguments.name or name_of(arguments)
    found = {"task.data-path": arguments.data, "output-dir": arguments.output_dir, "run-name": name}
    directory = Path(arguments.output_dir) / name
    return found | ({"resume": str(directory)} if directory.exists() else {})


def begun_or_resumed(arguments: argparse.Namespace, settings: dict[str, Any], narrator: ConsoleReporter) -> Outcome:
    """The run, begun or gone on with.

    Raises:
        ConfigError: another run of this name is there, or one that cannot go on.
    """
    from cloister.simulation.simulate import simulate

    place = place_of(arguments)
    try:
        return simulate(settings | place, arguments.clients, narrator)
    except ConfigError as error:
        if "resume" not in place:
            raise
        raise ConfigError(f"{error}\n{place['resume']} is there: give --name or --output-dir for a new run") from None


def seconds_of_a_round(system: str, arguments: argparse.Namespace) -> float:
    """How long a round takes, by the first estimate."""
    clients = PARTICIPATION[arguments.clients] * arguments.clients
    return clients * (BASELINE_SECONDS if system == "baseline" else SECONDS)[arguments.model]


def federated(system: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a system; its curve, and what is to be said about its privacy. All rounds that were planned are counted."""
    settings = settings_of(system, arguments)
    narrator = TimeLeft(settings["num-rounds"], Console(quiet=arguments.quiet), seconds_of_a_round(system, arguments))
    start = time.perf_counter()
    outcome = begun_or_resumed(arguments, settings, narrator)
    config, resumes = outcome.plan.config, outcome.plan.resumes
    curve = [[done.number, *scores(done.central)] for done in outcome.rounds]
    return {
        "system": system,
        "clients": arguments.clients,
        "partition": arguments.partition,
        "settings": settings,
        "columns": ["round", "accuracy", "loss"],
        "curve": curve,
        "seconds-since-the-last-start": round(time.perf_counter() - start),
        "ended": outcome.ended,
        "resumes": resumes,
        # Planned rounds, for stopping may depend on what was released; and for each resumption one more: the round
        # that was broken off may have been sent.
        "accounted-rounds": config.num_rounds + resumes,
        "accounting": accounting(config, config.num_rounds + resumes),
        "server-claims": outcome.privacy["claims"],
    }


def accounting(config: Any, rounds: int) -> dict[str, Any]:
    """What the run would claim with secret noise, beside what the thesis claims."""
    server, found = config.privacy.server, {}
    if config.privacy.client.clips_gradients:
        found |= {"published": published_deltas(config, rounds), "sound": sound_claims(config, rounds)}
    if server.name == "global-dp" and not server.is_calibrated:
        found["server"] = server_epsilon(config, rounds)
    return found


def published_deltas(config: Any, rounds: int) -> dict[str, float]:
    """By the formulas of the thesis."""
    from published import Setting, published_client, published_example

    setting = Setting(
        config.privacy.client.noise_multiplier,
        config.client.batch_size,
        config.task.examples_per_client,
        config.client.local_epochs,
        config.strategy.fraction_train,
        rounds,
    )
    return {
        "example-delta-at-1.31": published_example(setting).delta(1.31, "published"),
        "client-delta-at-8": published_client(setting).delta(8, "published"),
    }


def sound_claims(config: Any, rounds: int) -> dict[str, Any]:
    """About an example of a client that took part in an average number of rounds, and of one in every round."""
    from cloister.privacy.claims.client import dp_sgd_claim
    from cloister.privacy.claims.to_json import record_clients
    from cloister.privacy.dpsgd.local_steps import LocalDpSgd, LocalSteps
    from cloister.privacy.mechanisms.selection import ReleaseContext

    mechanism = LocalDpSgd(config.privacy.client.noise_multiplier, config.privacy.dp_sgd.clipping_norm)
    examples, client = config.task.examples_per_client, config.client
    steps = [LocalSteps(examples, client.batch_size, client.local_epochs, config.privacy.dp_sgd.batch_sampling)]
    taken_part = {
        "average-client": round(config.strategy.fraction_train * rounds),
        "client-in-every-round": rounds,
    }
    claims = {
        name: dp_sgd_claim(mechanism, steps, number, 1e-5, ReleaseContext()) for name, number in taken_part.items()
    }
    return {name: record_clients(claim)["by-examples"][0]["claims"] for name, claim in claims.items()}


def server_epsilon(config: Any, rounds: int) -> dict[str, Any]:
    """Of a client, by the server's noise."""
    from cloister.privacy.accounting.account import Account, best_epsilon
    from cloister.privacy.accounting.events import Gaussian
    from cloister.privacy.accounting.vocabulary import Sampling

    strategy = config.strategy
    drawn = Sampling("poisson", strategy.fraction_train) if strategy.sampling == "poisson" else Sampling()
    account = Account().plus(Gaussian(config.privacy.server.noise_multiplier, drawn), rounds)
    return {"sampling": drawn.kind, "client-epsilon-at-1e-3": best_epsilon(account, 1e-3)[0]}


def central(arguments: argparse.Namespace) -> dict[str, Any]:
    """DP-SGD on all of MNIST in one place, an epoch being 100 Poisson batches of 600 on average."""
    from cloister.config.run import TaskConfig
    from cloister.privacy.dpsgd.batches import poisson
    from cloister.tasks.datasets.characters import Mnist

    settings = CENTRAL | ({} if arguments.sigma is None else {"noise-multiplier": arguments.sigma})
    task = Mnist(TaskConfig(name="mnist", model=arguments.model, data_path=arguments.data))
    data, model = task.load(), task.build()
    model.initialise(settings["seed"])
    name, steps = arguments.name or name_of(arguments), len(data.train) // settings["batch-size"]
    weights = Path(arguments.output_dir) / f"{name}.npz"
    curve = curve_so_far(model, weights, arguments.results / f"{name}-stopped.json")
    private = central_trainer(model, settings, settings["seed"] + len(curve))
    rate = settings["batch-size"] / len(data.train)
    target = TARGET_EPSILON.get(settings["noise-multiplier"], 2.0)
    columns = ["epoch", "accuracy", "loss", f"published-delta-at-{target:g}", "epsilon-at-1e-5"]
    result: dict[str, Any] = {"system": "central", "settings": settings, "columns": columns, "curve": curve}
    done = len(curve)
    print(hours(EPOCH[arguments.model] * (arguments.epochs - done)), flush=True)
    start = time.perf_counter()
    for epoch in range(done + 1, arguments.epochs + 1):
        for batch in poisson(len(data.train), rate, steps, seed=10**6 + epoch):
            private.step(data.train.x[batch], data.train.y[batch])
        accuracy, loss = scores(task.metrics(data.test.y, model.predict(data.test.x)))
        spent = central_privacy(settings["noise-multiplier"], rate, epoch * steps, target)
        result["curve"].append([epoch, accuracy, loss, *spent])
        result["seconds-since-the-last-start"] = round(time.perf_counter() - start)
        left = hours((time.perf_counter() - start) / (epoch - done) * (arguments.epochs - epoch))
        print(f"epoch {epoch}  accuracy {accuracy:.4f}  {left}", flush=True)
        if epoch % 10 == 0:
            save(result | provenance(arguments) | {"ended": "not yet"}, arguments.results, name)
            weights.parent.mkdir(parents=True, exist_ok=True)
            np.savez(weights, epoch=epoch, **model.arrays())
    return result


def curve_so_far(model: Any, weights: Path, stopped: Path) -> list[list[float]]:
    """The curve of a stopped run up to its kept weights, which the model takes; empty: there is none."""
    if not (weights.exists() and stopped.exists()):
        return []
    with np.load(weights) as archive:
        arrays = dict(archive)
    epoch = int(arrays.pop("epoch"))
    model.assign(arrays)
    return json.loads(stopped.read_text())["curve"][:epoch]


def central_trainer(model: Any, settings: Mapping[str, Any], seed: int) -> Any:
    """DP-SGD on a model, with the noise of a seed."""
    import keras

    from cloister.privacy.dpsgd.step import DpSgd
    from cloister.privacy.mechanisms.noise import GaussianNoise

    trainer = DpSgd(
        model.keras,
        batch_size=settings["batch-size"],
        noise_multiplier=settings["noise-multiplier"],
        clipping_norm=settings["clipping-norm"],
        optimizer=keras.optimizers.SGD(settings["learning-rate"]),
    )
    trainer.noise = GaussianNoise(seed)
    return trainer


def central_privacy(noise_multiplier: float, rate: float, steps: int, target: float) -> tuple[float, float]:
    """δ at a target of ε by the published conversion, and ε at δ = 1e-5, after so many steps."""
    from cloister.privacy.accounting.account import Account
    from cloister.privacy.accounting.events import Gaussian
    from cloister.privacy.accounting.vocabulary import Sampling

    account = Account().plus(Gaussian(noise_multiplier, Sampling("bounded-poisson", rate)), steps)
    return account.delta(target, "published"), account.epsilon(1e-5)


def provenance(arguments: argparse.Namespace) -> dict[str, Any]:
    """How a result came about, without where things lie on this machine."""
    given = {"data": "FOLDER_OF_MNIST_NPZ", "rounds": arguments.rounds, "clients": arguments.clients}
    given |= {"partition": arguments.partition, "epochs": arguments.epochs}
    names = ("data", "epochs") if arguments.system == "central" else ("data", "rounds", "clients", "partition")
    options = " ".join(f"--{name} {given[name]}" for name in names)
    options += "" if arguments.sigma is None else f" --sigma {arguments.sigma:g}"
    options += "" if arguments.model == MODELS[0] else f" --model {arguments.model}"
    options += "".join(f" -c {shlex.quote(line)}" for line in arguments.config or [])
    command = f"python experiments/end_to_end.py {arguments.system} {options}"
    return {"command": command}


def scores(metrics: Any) -> tuple[float, float]:
    """Accuracy and loss, in four digits."""
    return round(metrics["accuracy"], 4), round(metrics["loss"], 4)


def name_of(arguments: argparse.Namespace) -> str:
    """A name for a run and its result."""
    more = "" if arguments.sigma is None else f"-sigma-{arguments.sigma:g}"
    more += "" if arguments.model == MODELS[0] else f"-{arguments.model}"
    if arguments.system == "central":
        return f"central{more}"
    return f"{arguments.system}-{arguments.partition}-{arguments.clients}{more}"


def suffix_of(result: dict[str, Any]) -> str:
    """What the name of a result ends with: a run that was stopped takes no other result's place."""
    return "" if result.get("ended", "as-asked") in ("as-asked", "budget") else "-stopped"


def refuse_to_replace(arguments: argparse.Namespace, name: str) -> None:
    """Raises ConfigError if there is a result of this name, whole or stopped, that another command made."""
    command = provenance(arguments)["command"]
    for path in (arguments.results / f"{name}.json", arguments.results / f"{name}-stopped.json"):
        if path.exists() and (found := json.loads(path.read_text())["command"]) != command:
            raise ConfigError(f"{path} was made by {found!r}: give --name for {command!r}")


def save(result: dict[str, Any], place: Path, name: str) -> None:
    """Write a result down, a row of its curve a line. A whole one takes the place of what was kept when it stopped."""
    place.mkdir(parents=True, exist_ok=True)
    if not (suffix := suffix_of(result)):
        (place / f"{name}-stopped.json").unlink(missing_ok=True)
    name += suffix
    rows = ",\n    ".join(json.dumps(row) for row in result["curve"])
    text = json.dumps({**result, "curve": "CURVE"}, indent=2, ensure_ascii=False)
    (place / f"{name}.json").write_text(text.replace('"CURVE"', f"[\n    {rows}\n  ]") + "\n")


def rows(results: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Of the table: what the thesis prints, and what else was run."""
    for name in dict.fromkeys((*PUBLISHED, *results)):
        length, reported = PUBLISHED.get(name, (0, None))
        published = NONE if reported is None else f"{reported:.2f} %, {length:,}"
        ours = difference = best = NONE
        if name in results:
            curve = results[name]["curve"]
            (last, accuracy, *_), (at, highest, *_) = curve[-1], max(curve, key=lambda row: row[1])
            ours = f"{100 * accuracy:.2f} %, {last:,}" + (" (stopped)" if suffix_of(results[name]) else "")
            difference = f"{100 * accuracy - reported:+.2f}" if reported and last == length else NONE
            best = f"{100 * highest:.2f} %, {at:,}"
        yield name, published, ours, difference, best


def table(place: Path) -> None:
    """Write the thesis' figures beside ours, and draw our curves, of the results in a folder."""
    paths = sorted(place.glob("*.json"))
    results = {path.stem.removesuffix("-stopped"): json.loads(path.read_text()) for path in paths}
    about = (
        "MNIST, accuracy after so many rounds (central: epochs). The thesis gives no standard deviations. Ours are of "
        "one run each. The difference is given where both ran the same number of rounds."
    )
    write_table(place / "table.md", about, HEAD, rows(results))
    clips = {name: results.pop(name) for name in list(results) if name.startswith("proposed") and "-clip-" in name}
    if clips:
        plot_clips(clips, place / "clips.png")
    plot(results, place.with_suffix(".png"))


def plot_clips(results: Mapping[str, dict[str, Any]], picture: Path) -> None:
    """Accuracy by round beside the clip by round, constant and decaying (figure 4.4)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, result in results.items():
        rounds, accuracy = zip(*(row[:2] for row in result["curve"]), strict=True)
        start, decay, least = (result["settings"][f"privacy.{key}"] for key in CLIP)
        name = name.rpartition("-clip-")[2].replace("-", " ")
        left.plot(rounds, accuracy, label=name)
        right.plot(rounds, [max(least, start * (1 - decay) ** max(0, number - 1)) for number in rounds], label=name)
    left.set(xlabel="round", ylabel="test accuracy", title="MNIST, one seed", ylim=(0.6, 0.9))
    right.set(xlabel="round", ylabel="clip S of a gradient", title="clip", ylim=(0, None))
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=80)


def plot(results: Mapping[str, dict[str, Any]], picture: Path) -> None:
    """All curves as they are: federated ones by round, and the central one by epoch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.5))
    left.set_prop_cycle(color=pyplot.colormaps["tab20"].colors)
    for name, result in sorted(results.items()):
        x, y = ([row[column] for row in result["curve"]] for column in (0, 1))
        (right if result["system"] == "central" else left).plot(x, y, label=name)
    left.set(xlabel="round", ylabel="test accuracy", title="MNIST, clients of 600 examples")
    right.set(xlabel="epoch", title="central DP-SGD: batch 600, S 4, rate 0.02")
    right.axhline(0.9249, linestyle=":", color="grey", label="reported at 247 epochs, σ 4")
    left.axhline(0.8908, linestyle=":", color="grey", label="reported at 635 rounds: proposed, iid")
    for axes in (left, right):
        axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Run one system, or draw what was run."""
    options = parser(__doc__, ["mnist"])
    options.add_argument("system", choices=[*SYSTEMS, "central", "table"])
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--clients", type=int, default=100, choices=sorted(PARTICIPATION))
    options.add_argument("--partition", default="iid", choices=["iid", "shards"])
    options.add_argument("--epochs", type=int, default=247)
    options.add_argument("--model", default=MODELS[0], choices=MODELS)
    options.add_argument("--sigma", type=float, help="of DP-SGD; by default the configuration's, or 4 for central")
    options.add_argument("--output-dir", default="runs")
    options.add_argument("--quiet", action="store_true")
    options.add_argument(
        "--name",
        default="",
        help="of the run and of its result; by default from system, partition, clients, σ and model",
    )
    options.add_argument("-c", dest="config", action="append", help="a key of the configuration, in TOML")
    arguments = options.parse_args()
    arguments.results /= "end_to_end"
    if arguments.system == "table":
        table(arguments.results)
        return
    name = arguments.name or name_of(arguments)
    try:
        refuse_to_replace(arguments, name)
        if (there := arguments.results / f"{name}.json").exists():
            print(f"{there} is there", flush=True)
            return
        result = central(arguments) if arguments.system == "central" else federated(arguments.system, arguments)
    except DataError as error:
        raise SystemExit(f"{error}\n{SOURCES['mnist'].origin}") from None
    except CloisterError as error:
        raise SystemExit(str(error)) from None
    result |= provenance(arguments)
    save(result, arguments.results, name)
    print(result["curve"][-1], flush=True)


if __name__ == "__main__":
    main()
