"""Preview as JSON, with claims in the format of `privacy.json`."""

import math
from dataclasses import asdict, replace

from cloister.plan.preview import Preview
from cloister.plan.words import AT_MOST
from cloister.privacy.claims.record import record as record_statement
from cloister.privacy.claims.record import record_clients
from cloister.server.lasting import closing_refused


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
