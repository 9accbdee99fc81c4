"""Keys of earlier versions: refused with their new name, and translated in the records of earlier runs."""

from collections.abc import Mapping

from cloister.config.io import Scalar

CHOICE = "privacy.client"
"""Key whose value stands for `{client}` in a new name."""
CLIENTS = ("dp-sgd", "gaussian", "laplace")
RENAMED: Mapping[str, str] = {
    "privacy.client-noise-multiplier": "privacy.{client}-noise-multiplier",
    "privacy.bits-noise-multiplier": "privacy.clipping-count-noise-multiplier",
}
"""Old keys with their new names. A value keeps its meaning."""


def refusal(key: str, settings: Mapping[str, Scalar]) -> str:
    """Return the message for an old key, with the new name.

    Args:
        key: one of `RENAMED`.
        settings: dotted keys of the run.
    """
    client, new = settings.get(CHOICE), RENAMED[key]
    names = [new.format(client=each) for each in CLIENTS if client == each or client not in CLIENTS]
    *most, last = dict.fromkeys(names)
    return f"{key} = {settings[key]!r} has a new name: use {', '.join(most)}{' or ' * bool(most)}{last}"


def translated(recorded: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings of a recorded run with the present keys.

    Runs without a mechanism of the clients recorded its noise too, without effect: it is left out.

    Args:
        recorded: dotted keys, as any version wrote them.
    """
    client, found = recorded.get(CHOICE), dict(recorded)
    for key in RENAMED.keys() & recorded:
        value, new = found.pop(key), RENAMED[key]
        if "{client}" not in new or client in CLIENTS:
            found[new.format(client=client)] = value
    return found
