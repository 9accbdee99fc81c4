"""Names that a new package cannot have."""

from importlib.util import find_spec

from cloister.core.errors import ConfigError
from cloister.privacy.mechanisms import MECHANISMS
from cloister.server.strategies import STRATEGIES
from cloister.tasks import TASKS

KNOWN = {"task": TASKS, "strategy": STRATEGIES, "mechanism": MECHANISMS}


def refuse_taken(kind: str, name: str) -> None:
    """Refuse the name of a plugin, or of a package, that is installed: one of the two could not be found any more.

    Args:
        kind: task, strategy or mechanism; of another one nothing is known.
        name: of the plugin; its package has it too.

    Raises:
        ConfigError: it is taken.
    """
    if kind in KNOWN and name in KNOWN[kind].names():
        raise ConfigError(f"the {kind} {name!r} is there already; choose another name")
    module = name.replace("-", "_")
    if module.isidentifier() and find_spec(module) is not None:
        raise ConfigError(f"the name {name!r} is that of an installed package, {module}; choose another")
