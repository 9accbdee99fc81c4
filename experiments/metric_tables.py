"""What the metric-privacy paper prints, beside what the cells that were run came to."""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from metric_cells import LAST, MULTIPLIER, PARTITIONS, SERVERS, STRATEGIES, Cell

from cloister.tasks.scores import RATES

PUBLISHED = {
    # Mean and standard deviation of the accuracy on the clients' test sets over the last five rounds.
    ("table-2", "fedavg"): ((0.929, 0.008), (0.881, 0.013), (0.905, 0.007)),
    ("table-2", "fedavgm"): ((0.878, 0.013), (0.759, 0.024), (0.799, 0.022)),
    ("table-2", "fedmedian"): ((0.920, 0.005), (0.885, 0.013), (0.905, 0.018)),
    ("table-2", "fedprox"): ((0.931, 0.006), (0.879, 0.008), (0.907, 0.022)),
    ("table-2", "fedopt"): ((0.956, 0.004), (0.918, 0.014), (0.948, 0.005)),
    ("table-2", "fedyogi"): ((0.950, 0.006), (0.906, 0.008), (0.911, 0.012)),
    ("table-3", "fedavg"): ((0.933, 0.002), (0.878, 0.012), (0.927, 0.008)),
    ("table-3", "fedavgm"): ((0.909, 0.007), (0.790, 0.018), (0.840, 0.016)),
    ("table-3", "fedmedian"): ((0.926, 0.009), (0.838, 0.013), (0.905, 0.007)),
    ("table-3", "fedprox"): ((0.937, 0.014), (0.878, 0.016), (0.943, 0.003)),
    ("table-3", "fedopt"): ((0.964, 0.007), (0.925, 0.009), (0.945, 0.006)),
    ("table-3", "fedyogi"): ((0.945, 0.005), (0.912, 0.009), (0.919, 0.010)),
}
"""Its tables 5 and 7: mean and standard deviation, in the order of `SERVERS`."""
LESS_NOISE = {
    "fedavg": ((0.956, 0.007), (0.968, 0.001)),
    "fedavgm": ((0.851, 0.010), (0.841, 0.011)),
    "fedmedian": ((0.959, 0.005), (0.963, 0.004)),
    "fedprox": ((0.964, 0.003), (0.973, 0.004)),
    "fedopt": ((0.949, 0.006), (0.961, 0.004)),
    "fedyogi": ((0.927, 0.004), (0.942, 0.004)),
}
"""Its table B.15: as table 5 with z = 0.003, under global DP and metric noise."""
TEST = {
    ("table-2", "fedavg"): ((0.909, 0.903, 0.950), (0.884, 0.862, 0.918), (0.894, 0.843, 0.943)),
    ("table-2", "fedavgm"): ((0.884, 0.768, 0.932), (0.762, 0.554, 0.607), (0.823, 0.608, 0.631)),
    ("table-2", "fedmedian"): ((0.932, 0.899, 0.946), (0.875, 0.827, 0.913), (0.895, 0.843, 0.943)),
    ("table-2", "fedprox"): ((0.909, 0.848, 0.873), (0.877, 0.853, 0.914), (0.903, 0.877, 0.944)),
    ("table-2", "fedopt"): ((0.950, 0.936, 0.970), (0.918, 0.877, 0.911), (0.930, 0.917, 0.950)),
    ("table-2", "fedyogi"): ((0.933, 0.914, 0.957), (0.908, 0.841, 0.884), (0.917, 0.888, 0.941)),
    ("table-3", "fedavg"): ((0.919, 0.930, 0.956), (0.867, 0.787, 0.886), (0.925, 0.914, 0.931)),
    ("table-3", "fedavgm"): ((0.909, 0.862, 0.944), (0.784, 0.573, 0.594), (0.837, 0.621, 0.640)),
    ("table-3", "fedmedian"): ((0.933, 0.917, 0.961), (0.859, 0.626, 0.641), (0.917, 0.926, 0.940)),
    ("table-3", "fedprox"): ((0.920, 0.910, 0.950), (0.886, 0.871, 0.904), (0.903, 0.890, 0.909)),
    ("table-3", "fedopt"): ((0.936, 0.927, 0.957), (0.922, 0.913, 0.960), (0.916, 0.885, 0.889)),
    ("table-3", "fedyogi"): ((0.927, 0.870, 0.950), (0.900, 0.845, 0.836), (0.895, 0.847, 0.865)),
}
"""Its tables 6 and 8: accuracy, F1 and precision of the last model on the server's test set."""
FIVE_SEEDS = {
    "fedavg": ((0.930, 0.011), (0.881, 0.013), (0.913, 0.019)),
    "fedavgm": ((0.880, 0.004), (0.781, 0.021), (0.812, 0.028)),
    "fedmedian": ((0.931, 0.000), (0.867, 0.013), (0.897, 0.004)),
    "fedprox": ((0.923, 0.011), (0.880, 0.014), (0.919, 0.011)),
    "fedopt": ((0.947, 0.005), (0.912, 0.010), (0.924, 0.010)),
    "fedyogi": ((0.939, 0.008), (0.899, 0.007), (0.895, 0.013)),
}
"""Its table A.14: accuracy on the server's test set over five runs, clients alike."""
NONE = "–"
ROWS: Mapping[str, tuple[str, str]] = {
    **{name: (name, name) for name in STRATEGIES},
    "fedprox, μ sent and not used": ("fedprox", "fedavg"),
}
"""Rows of a table: the paper's strategy, and the cells of ours. Flower's FedProx sends μ, and clients have to apply it;
a client that does not makes it FedAvg."""


def table(arguments: argparse.Namespace) -> None:
    """Write the paper's figures beside ours.

    Args:
        arguments: folder of results, size, placement, multiplier and number of seeds.
    """
    size, noise = arguments.size, arguments.multiplier
    lines = [f"Images of {size}×{size}, placement {arguments.placement}, z = {noise}."]
    if size != 128:
        lines.append("The paper's are of 128×128: these are not its tables.")
    lines += ["", *_of_clients(arguments), "", *_of_the_server(arguments)]
    text = "\n".join(lines) + "\n"
    print(text)
    arguments.results.mkdir(parents=True, exist_ok=True)
    other = f"-z{noise:g}" if noise != MULTIPLIER else ""
    (arguments.results / f"table-{size}-{arguments.placement}{other}.md").write_text(text)


def _found(arguments: argparse.Namespace, partition: str, strategy: str, server: str) -> list[dict[str, Any]]:
    """The results that are there, one for each seed."""
    given = (arguments.size, partition, strategy, server, arguments.placement)
    made = (arguments.results / Cell(*given, seed, arguments.multiplier).path for seed in range(arguments.seeds))
    return [json.loads(path.read_text()) for path in made if path.exists()]


def _of_clients(arguments: argparse.Namespace) -> Iterator[str]:
    """Tables 5, 7 and B.15: a difference is in standard deviations of the paper's last rounds."""
    yield "Accuracy on the clients' test sets, mean ± standard deviation of the last five rounds (tables 5, 7, B.15):"
    yield ""
    yield "| partition | strategy | mechanism | paper | ours | apart, std | seeds |"
    yield "|---|---|---|---|---|---|---|"
    for partition, row, server in itertools.product(PARTITIONS, ROWS, SERVERS):
        strategy, own = ROWS[row]
        paper = _printed(partition, strategy, server, arguments.multiplier)
        found = [each["clients"][-LAST:] for each in _found(arguments, partition, own, server)]
        ours, apart = NONE, NONE
        if found:
            middle, spread = (
                statistics.mean(map(statistics.mean, found)),
                statistics.mean(map(statistics.pstdev, found)),
            )
            ours = f"{middle:.3f} ± {spread:.3f}"
            apart = f"{(middle - paper[0]) / paper[1]:+.1f}" if paper else NONE
        told = f"{paper[0]:.3f} ± {paper[1]:.3f}" if paper else NONE
        yield f"| {partition} | {row} | {server} | {told} | {ours} | {apart} | {len(found)} |"


def _printed(partition: str, strategy: str, server: str, multiplier: float) -> tuple[float, float] | None:
    """What the paper prints; None where it prints nothing."""
    number = SERVERS.index(server)
    if multiplier == MULTIPLIER or server == "none":
        return PUBLISHED[partition, strategy][number]
    is_there = partition == "table-2" and multiplier == 0.003
    return LESS_NOISE[strategy][number - 1] if is_there else None


def _of_the_server(arguments: argparse.Namespace) -> Iterator[str]:
    """Tables 6, 8 and A.14."""
    yield "The last model on the server's test set: accuracy, F1, precision (tables 6, 8), micro AUC of one class"
    yield "against the rest (figures C.2, C.3), and mean ± std of the accuracy over seeds (table A.14 has five):"
    yield ""
    yield "| partition | strategy | mechanism | paper | ours | AUC | paper, A.14 | ours | seeds |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for partition, row, server in itertools.product(PARTITIONS, ROWS, SERVERS):
        strategy, own = ROWS[row]
        number, is_printed = SERVERS.index(server), arguments.multiplier == MULTIPLIER
        paper = ", ".join(f"{value:.3f}" for value in TEST[partition, strategy][number]) if is_printed else NONE
        mean, spread = FIVE_SEEDS[strategy][number]
        over = f"{mean:.3f} ± {spread:.3f}" if is_printed and partition == "table-2" else NONE
        found = [each["last"]["metrics"] for each in _found(arguments, partition, own, server)]
        yield f"| {partition} | {row} | {server} | {paper} | {_told(found, over)} | {len(found)} |"


def _told(found: Sequence[dict[str, float]], over: str) -> str:
    """Our columns, and the paper's between them."""
    if not found:
        return " | ".join((NONE, NONE, over, NONE))
    ours = ", ".join(f"{statistics.mean(each[name] for each in found):.3f}" for name in ("accuracy", "f1", "precision"))
    auc, accuracy = statistics.mean(each["auc"] for each in found), [each["accuracy"] for each in found]
    spread = f"{statistics.mean(accuracy):.3f} ± {statistics.stdev(accuracy):.3f}" if len(found) > 1 else NONE
    return " | ".join((ours, f"{auc:.3f}", over, spread))


def curves(arguments: argparse.Namespace) -> None:
    """Draw the accuracy on the clients' test sets by rounds: a panel for each mechanism (figures D.4 and D.5).

    Draw the last models' AUC and ROC curves too (figures C.2 and C.3).

    Args:
        arguments: folder of results, size, placement, multiplier, partitions; the first seed is drawn.
    """
    from matplotlib.figure import Figure

    for partition in arguments.partitions:
        _roc(arguments, partition)
        figure = Figure(figsize=(12, 4), layout="constrained")
        panels = figure.subplots(1, len(SERVERS), sharey=True)
        for panel, server in zip(panels, SERVERS, strict=True):
            for strategy in STRATEGIES:
                for each in _found(arguments, partition, strategy, server)[:1]:
                    panel.plot(range(1, len(each["clients"]) + 1), each["clients"], label=strategy)
            panel.set(title=server, xlabel="round")
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("accuracy, clients' test sets")
        if panels[0].lines:
            panels[0].legend()
            path = arguments.results / f"curves-{partition}-{arguments.size}-{arguments.placement}.png"
            figure.savefig(path, dpi=100)
            print(path)


def _roc(arguments: argparse.Namespace, partition: str) -> None:
    """Draw the micro AUC of each strategy and mechanism, and the curves that are kept, as their mean over classes."""
    from matplotlib.figure import Figure

    found = {
        (strategy, server): each["last"]
        for strategy, server in itertools.product(STRATEGIES, SERVERS)
        for each in _found(arguments, partition, strategy, server)[:1]
    }
    if not found:
        return
    end = f"{partition}-{arguments.size}-{arguments.placement}.png"
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    panel = figure.subplots()
    for shift, server in enumerate(SERVERS):
        own = [(number, found[name, server]) for number, name in enumerate(STRATEGIES) if (name, server) in found]
        areas = [last["metrics"]["auc"] for _, last in own]
        panel.plot([number + 0.12 * (shift - 1) for number, _ in own], areas, "os^"[shift], label=server)
    panel.set_xticks(range(len(STRATEGIES)), list(STRATEGIES))
    panel.set(
        ylabel="micro AUC, the server's test set", title=f"images of {arguments.size}×{arguments.size}, {partition}"
    )
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(arguments.results / f"auc-{end}", dpi=80)
    if not any(last.get("roc") for last in found.values()):
        return
    figure = Figure(figsize=(9, 6), layout="constrained")
    for panel, strategy in zip(figure.subplots(2, 3, sharex=True, sharey=True).flat, STRATEGIES, strict=True):
        for server in SERVERS:
            if classes := found.get((strategy, server), {}).get("roc"):
                shares = [statistics.mean(each) for each in zip(*(curve["found"] for curve in classes), strict=True)]
                area = found[strategy, server]["metrics"]["auc"]
                panel.plot(RATES, shares, label=f"{server}, micro AUC {area:.3f}")
        panel.set(title=strategy, xlabel="false alarms", ylabel="found, mean over classes")
        if panel.lines:
            panel.legend(loc="lower right", fontsize=8)
    figure.savefig(arguments.results / f"roc-{end}", dpi=80)
