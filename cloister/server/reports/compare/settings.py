"""The settings of runs that are put beside each other: those in force, and those in which the runs differ."""

from collections.abc import Mapping, Sequence

from cloister.config.privacy import idle
from cloister.config.run import RunConfig
from cloister.config.section import Scalar
from cloister.server.reports.html.facts import Facts
from cloister.server.reports.html.officer import claims_of

PLACES = ("run-name", "output-dir")
"""Keys that say what a run is called and where it lies, and nothing about what it does."""
AMOUNTS = tuple(f"privacy.{side}{name}" for side in ("", "client-") for name in ("noise-multiplier", "clipping-norm"))
"""Keys that tell mechanisms apart at their defaults too."""
BUDGETS = ("privacy.max-epsilon", "privacy.client-max-epsilon", "privacy.max-leakage")
"""Keys whose 0 is no number but says that there is no budget."""
Settings = Mapping[str, Scalar]


def in_force(facts: Facts) -> dict[str, Scalar]:
    """The settings of a run that had an effect; in place of `auto` what was found, where the claim has it.

    Args:
        facts: of the run.
    """
    found = {key: value for claim in claims_of(facts) for key, value in claim.parameters.items()}
    without = idle(facts.config)
    without |= {key for key in BUDGETS if not facts.config.get(key)}
    settings = {key: value for key, value in facts.config.items() if key not in without}
    return settings | {key: _rounded(found[key]) for key, value in settings.items() if value == "auto" and key in found}


def _rounded(value: Scalar) -> Scalar:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def differing(configs: Sequence[Settings]) -> list[str]:
    """The keys that do not have the same value in all of several configurations, in alphabetical order.

    Args:
        configs: dotted keys of each.
    """
    keys = sorted({key for config in configs for key in config} - set(PLACES))
    return [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]


def telling(configs: Sequence[Settings]) -> list[str]:
    """Those of them that are worth a column: not a default that only some of the runs have.

    Args:
        configs: what `in_force` gives, of each run.
    """
    defaults = RunConfig().flat()

    def tells(key: str) -> bool:
        values = {repr(config[key]) for config in configs if key in config}
        return key in AMOUNTS or values != {repr(defaults.get(key))}

    return [key for key in differing(configs) if tells(key)]
