"""Settings of compared runs: those in force, and those in which the runs differ."""

from collections.abc import Mapping, Sequence

from cloister.config.privacy import idle
from cloister.config.run import RunConfig
from cloister.config.section import Scalar
from cloister.server.reports.html.facts import Facts
from cloister.server.reports.html.officer import claims_of

PLACES = ("run-name", "output-dir")
"""Keys of a run's name and place, without effect on its results."""
AMOUNTS = tuple(f"privacy.{side}{name}" for side in ("", "client-") for name in ("noise-multiplier", "clipping-norm"))
"""Keys that distinguish mechanisms even at their defaults."""
BUDGETS = ("privacy.max-epsilon", "privacy.client-max-epsilon", "privacy.max-leakage")
"""Keys for which 0 means that there is no budget."""
Settings = Mapping[str, Scalar]


def in_force(facts: Facts) -> dict[str, Scalar]:
    """Return the settings of a run that had an effect.

    The value from the claim replaces `auto`, where the claim has it.

    Args:
        facts: of the run.
    """
    found = {key: value for claim in claims_of(facts) for key, value in claim.parameters.items()}
    without = idle(facts.config)
    without |= {key for key in BUDGETS if not facts.config.get(key)}
    settings = {key: value for key, value in facts.config.items() if key not in without}
    for key, value in settings.items():
        if value == "auto" and key in found:
            claimed = found[key]
            settings[key] = float(f"{claimed:.4g}") if isinstance(claimed, float) else claimed
    return settings


def differing(configs: Sequence[Settings]) -> list[str]:
    """Return the keys whose values differ, in alphabetical order.

    Args:
        configs: dotted keys of each.
    """
    keys = sorted({key for config in configs for key in config} - set(PLACES))
    return [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]


def telling(configs: Sequence[Settings]) -> list[str]:
    """Return the differing keys that merit a column.

    Excluded are defaults that only some of the runs have.

    Args:
        configs: the result of `in_force` for each run.
    """
    defaults = RunConfig().flat()

    def tells(key: str) -> bool:
        values = {repr(config[key]) for config in configs if key in config}
        return key in AMOUNTS or values != {repr(defaults.get(key))}

    return [key for key in differing(configs) if tells(key)]
