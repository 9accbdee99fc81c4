"""Keys of earlier versions: refused with their new name, and translated in records of runs and policies of sites."""

from collections.abc import Mapping

from cloister.config.io import Scalar

CLIENTS = ("dp-sgd", "gaussian", "laplace")
"""Mechanisms of the clients whose keys had names in common."""
COMMON = ("dp-sgd", "gaussian")
"""Mechanisms that had a clip, and in policies a smallest noise, in common."""
RENAMED: Mapping[str, tuple[str, ...]] = {
    "privacy.client-noise-multiplier": tuple(f"privacy.{each}-noise-multiplier" for each in CLIENTS),
    "privacy.client-clipping-norm": tuple(f"privacy.{each}-clipping-norm" for each in COMMON),
    "privacy.bits-noise-multiplier": ("privacy.clipping-count-noise-multiplier",),
}
"""Old keys with their new names; of several, that of the run's `privacy.client`. A value keeps its meaning."""


OLD_FLOOR, FLOOR = "min-client-noise-multiplier", "min-{}-noise-multiplier"
"""Rule of earlier policies for the noise of two mechanisms, which are not comparable, and the rules in its place."""


def names_of(key: str, settings: Mapping[str, Scalar]) -> tuple[str, ...]:
    """Return the new names of an old key: that of the clients' mechanism, or all if the run has none.

    Args:
        key: one of `RENAMED`.
        settings: dotted keys of the run.

    Returns:
        No name if the key had no effect with the mechanism.
    """
    names, client = RENAMED[key], settings.get("privacy.client")
    if len(names) == 1 or client not in CLIENTS:
        return names
    return tuple(name for name in names if name.startswith(f"privacy.{client}-"))


def refusal(key: str, settings: Mapping[str, Scalar]) -> str:
    """Return the message for an old key, with the new name or, if it had no effect, the advice to remove it.

    Args:
        key: one of `RENAMED`.
        settings: dotted keys of the run.
    """
    names = names_of(key, settings)
    if not names:
        return (
            f"{key} = {settings[key]!r} has no effect with privacy.client = {settings['privacy.client']!r}; remove it"
        )
    *most, last = names
    return f"{key} = {settings[key]!r} has a new name: use {', '.join(most)}{' or ' * bool(most)}{last}"


def translated(recorded: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings of a recorded run with the present keys.

    A key that several mechanisms had in common was recorded without effect where the run had none of them: it is left
    out.

    Args:
        recorded: dotted keys, as any version wrote them.
    """
    found = dict(recorded)
    for key in RENAMED.keys() & recorded:
        value, names = found.pop(key), names_of(key, recorded)
        if len(names) == 1:
            found[names[0]] = value
    return found


def with_own_floors(policy: Mapping[str, object]) -> dict[str, object]:
    """Return the rules of a policy with a smallest noise for each mechanism, in place of one for several.

    Args:
        policy: rules by key, as any version wrote them.

    Raises:
        ValueError: an old key and one in its place are both there.
    """
    found = dict(policy)
    if OLD_FLOOR not in found:
        return found
    value, listed = found.pop(OLD_FLOOR), found.get("mechanisms")
    chosen = [name for name in COMMON if isinstance(listed, list) and name in listed]
    names = [FLOOR.format(name) for name in chosen or COMMON]
    if twice := found.keys() & names:
        raise ValueError(f"{OLD_FLOOR} = {value!r} has a new name, and {min(twice)} is there too; remove the old one")
    return found | dict.fromkeys(names, value)
