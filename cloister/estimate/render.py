"""Preview of a run as lines of text, as JSON in the format of `privacy.json`, and as a plot."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

from cloister.config.io import as_pairs
from cloister.config.run import changed, shown
from cloister.estimate.budget import Allowance, Within, for_all
from cloister.estimate.preview import Preview
from cloister.estimate.quantities import Series, Timing, Traffic
from cloister.privacy.accounting.vocabulary import word_for
from cloister.privacy.claims.render import render as render_statement
from cloister.privacy.claims.to_json import record as record_statement
from cloister.privacy.claims.to_json import record_clients
from cloister.server.ledger_location import closing_refused, invalidation_warning
from cloister.utils.errors import ConfigError
from cloister.utils.text import at_least, at_most, counted

BAR = 40
"""Number of columns of the longest bar of a curve."""
AT_MOST = "at most, if all rounds run and a client trains in all of them; nothing was sent, spent or written"


def render(preview: Preview) -> list[str]:
    """Format the preview as lines of plain text."""
    config, forecast = preview.config, preview.forecast
    settings = as_pairs(changed(shown(config.flat())))
    lines = [
        f"plan       {config.task.name}, {config.strategy.name}, {config.num_rounds} rounds, "
        f"{preview.options.clients} clients",
        f"settings   {settings or 'the defaults'}",
        f"claims     {AT_MOST}",
    ]
    if forecast.closing:
        lines.append(f"budget     {invalidation_warning(forecast.prepared.plan, forecast.kept)}")
    if refused := closing_refused(forecast.prepared.plan, forecast.kept):
        lines.append(f"this run would be refused: {refused}")
    if forecast.stopped:
        lines.append(f"the run would stop {forecast.stopped}")
    if preview.refusal:
        lines.append(f"every node with this policy would refuse: {preview.refusal}")
    for title, part in (
        ("noise", _noise(preview)),
        ("what would be claimed", iter(render_statement(forecast.last))),
        ("clients as large as these", _sizes(preview)),
        ("by round", _curves(preview)),
        ("budgets", (_allowance(found, config.task.group) for found in preview.allowances)),
        (f"within ε = {preview.epsilon:g}", _all_within(preview.within, config.task.group)),
        ("time and bytes of training messages", _estimate(preview.traffic, preview.timing)),
    ):
        found = [f"  {line}" for line in part]
        lines += ["", title, *found] if found else []
    return lines


def _noise(preview: Preview) -> Iterator[str]:
    if (noise := preview.noise) is not None:
        server = preview.config.privacy.server
        z = "" if noise.multiplier is None else f"noise multiplier {at_least(noise.multiplier, 6)}, "
        auto = "from 'auto', " if server.is_calibrated else ""
        low, high = noise.std
        if low == high:
            std = f"{low:.4g}"
        elif low == 0:
            std = "of any size" if math.isinf(high) else f"up to {high:.4g}"
        else:
            std = f"from {low:.4g}" if math.isinf(high) else f"{low:.4g} to {high:.4g}"
        yield f"server, {server.name}: {z}{auto}standard deviation {std} on a weight of the model"
    for added in preview.noise_of_clients:
        std = "as training moves the model" if added.std is None else f"{added.std:.4g}"
        z = f"noise multiplier {at_least(added.multiplier, 6)}"
        yield f"clients, {added.mechanism}: {z}, standard deviation {std} on {added.on}"
    if preview.noise is None and not preview.noise_of_clients:
        yield "none"
    yield from (f"warning: {remark}" for remark in preview.hopeless)


def _sizes(preview: Preview) -> Iterator[str]:
    if preview.sizes is None or preview.by_size is None:
        return
    are_dealt = preview.sizes.are_dealt
    # The number of clients of a stated size is unknown.
    yield from (
        f"{counted(count, 'client') if are_dealt else 'a client'} with {steps.examples} {preview.by_size.word}s: "
        f"{counted(steps.count, 'step')} a round, each with {100 * steps.rate:.4g} % of them"
        for steps, count in sorted(preview.sizes.counts.items(), key=lambda item: item[0].examples)
        if steps in preview.sizes.shown
    )
    if preview.config.seed == -1 and are_dealt:
        yield f"dealt out by a seed that was drawn: seed={preview.forecast.prepared.plan.seed} deals them out again"


def _curves(preview: Preview) -> Iterator[str]:
    for series in preview.series:
        yield title(series)
        largest = max((value for _, value in series.points if math.isfinite(value)), default=0.0)
        width = max([8, *(len(at_most(value)) for _, value in series.points)])
        for number, value in series.points:
            length = BAR if math.isinf(value) else round(BAR * value / largest) if largest else 0
            yield f"  round {number:>5}  {at_most(value):<{width}}  {'█' * length}".rstrip()
    if preview.series:
        word = preview.config.task.group or "example"
        yield f"one {word} of a client is covered by what holds for the whole client"


def title(series: Series) -> str:
    """Return the title of a curve."""
    figure = "leakage" if "d-privacy" in series.relation else "ε"
    delta = f" at δ = {at_most(series.delta)}" if series.delta else ", pure" if series.delta == 0 else ""
    return f"{series.mechanism}: {figure}{delta} for {series.of}, {series.relation}; against {series.adversary}"


def _allowance(found: Allowance, group: str) -> str:
    what = "leakage" if found.unit == "neighbourhood" else f"ε at δ = {at_most(found.delta)}"
    more = "any number" if found.more is None else found.more
    return (
        f"{found.whose}, {what} of {found.limit:g} for one {word_for(found.unit, group)}: "
        f"{at_most(100 * found.before, 3)} % spent before, {at_most(100 * found.after, 3)} % after {found.rounds} "
        f"rounds; {more} more such rounds would fit"
    )


def _all_within(found: Sequence[Within], group: str = "") -> Iterator[str]:
    for each in found:
        noise = f"{each.key}={each.noise:.4g} for all rounds" if each.noise else each.why
        rounds = f"num-rounds={each.rounds}" if each.rounds else "not one round"
        fits = "" if each.rounds is None else f"; {rounds} with the noise that is set"
        yield f"{each.whose}, one {word_for(each.unit, group)}: {noise}{fits}"
    together = (each for each in for_all(found) if each.noise and each not in found)
    yield from (f"{each.whose}: {each.key}={each.noise:.4g} for all rounds" for each in together)


def render_nothing(preview: Preview) -> str:
    """Explain why the budget covers no round, with remedies; empty if rounds fit."""
    group = preview.config.task.group
    wanted = [item for item in for_all(preview.within) if item.is_nothing]
    told = []
    for item in wanted:
        noise = f"set {item.key}={item.noise:.4g}" if item.noise else item.why
        budget = f", or a budget of ε = {at_most(item.smallest)}, for all rounds" if item.smallest else ""
        told.append(f"{item.whose} of {preview.epsilon:g} for one {word_for(item.unit, group)}: {noise}{budget}")
    if any(item.smallest for item in wanted):
        told.append("a budget counts more strictly than the ε that a run claims")
    if preview.forecast.rounds and not told and not preview.options.epsilon:
        told = [
            f"{item.whose} of {item.limit:g} for one {word_for(item.unit, group)}: use a larger one, or more noise"
            for item in preview.allowances
            if item.rounds == 0
        ]
    return f"not one round fits the budget: {'; '.join(told)}" if told else ""


def _estimate(traffic: Traffic, timing: Timing | None) -> Iterator[str]:
    yield (
        f"{_bytes(traffic.down)} down and {_bytes(traffic.up)} up a message, {traffic.cohort:g} clients a round: "
        f"{_bytes(traffic.total)} in all"
    )
    if timing is not None:
        yield (
            f"a client took {_seconds(timing.first)} for its first message, {_seconds(timing.each)} for the next: "
            f"{_seconds(timing.one_by_one(traffic))} one after the other, {_seconds(timing.side_by_side(traffic))} "
            "with a machine like this one for each; aggregation, scores and networks come on top"
        )


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} B"


def _seconds(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.2g} h"
    return f"{seconds / 60:.2g} min" if seconds >= 90 else f"{seconds:.2g} s"


def record(preview: Preview) -> dict[str, object]:
    """Return the preview as a JSON object.

    `privacy` has the content of a later `privacy.json`, without the end of the run and the last hash of its ledger. A
    plan writes no ledger line.
    """
    forecast, traffic, timing = preview.forecast, preview.traffic, preview.timing
    noise, sizes, by_size = preview.noise, preview.sizes, preview.by_size
    server = noise and {
        "multiplier": noise.multiplier,
        "minimum-std": noise.std[0],
        "maximum-std": noise.std[1] if math.isfinite(noise.std[1]) else None,
    }
    estimate = _kebab(asdict(traffic)) | {"total-bytes": traffic.total}
    if timing is not None:
        estimate |= {
            "first-seconds": timing.first,
            "each-seconds": timing.each,
            "one-by-one-seconds": timing.one_by_one(traffic),
            "side-by-side-seconds": timing.side_by_side(traffic),
        }
    return {
        "note": AT_MOST,
        "clients": preview.options.clients,
        "rounds": forecast.rounds,
        "stops": forecast.stopped,
        "refusal": preview.refusal,
        "closing-refusal": closing_refused(forecast.prepared.plan, forecast.kept),
        "noise": {"server": server, "clients": [asdict(added) for added in preview.noise_of_clients]},
        "warnings": list(preview.hopeless),
        "closes-budgets": forecast.closing,
        "privacy": record_statement(replace(forecast.last, ledger=replace(forecast.last.ledger, head=""))),
        "by-round": [
            {**asdict(series), "points": [{"round": number, "value": value} for number, value in series.points]}
            for series in preview.series
        ],
        "by-size": sizes
        and by_size
        and {
            "clients-of-size": {str(steps.examples): count for steps, count in sizes.counts.items()},
            **record_clients(by_size),
        },
        "budgets": [_kebab(asdict(found)) for found in preview.allowances],
        "within": [_kebab(asdict(found)) for found in preview.within],
        "estimate": estimate,
    }


def _kebab(fields: dict[str, object]) -> dict[str, object]:
    return {name.replace("_", "-"): value for name, value in fields.items()}


WIDE = 50.0
"""Ratio of two curves' last values above which the scale is logarithmic."""


def draw(preview: Preview, path: Path) -> None:
    """Write the curves of a preview as a PNG file.

    Args:
        preview: of a run.
        path: of the file, in an existing folder.

    Raises:
        ConfigError: there is no curve, or the file cannot be written.
    """
    if not preview.series:
        raise ConfigError(f"--png {path}: no ε is claimed for this run, so that there is no curve to draw")
    # A separate canvas avoids pyplot, and with it any graphical backend.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    # Markers of several sizes keep equal curves visible.
    for size, series in zip(count(12, -2), preview.series, strict=False):
        values = [value if math.isfinite(value) else math.nan for _, value in series.points]
        rounds, label = [number for number, _ in series.points], "\n".join(textwrap.wrap(title(series), 100))
        axes.plot(rounds, values, marker="o", markersize=max(3, size), label=label)
    ends = [value for series in preview.series for _, value in series.points[-1:] if 0 < value < math.inf]
    # The scale starts at 0, or is logarithmic if the curves' last values differ widely.
    wide = bool(ends) and max(ends) > WIDE * min(ends)
    axes.set(xlabel="round", ylabel="ε", xlim=(0, None))
    axes.set(yscale="log") if wide else axes.set(ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="x-small")
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise ConfigError(f"--png {path} cannot be written: {error.strerror}") from error
