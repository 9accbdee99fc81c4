"""Reserved names of new packages."""

from importlib.util import find_spec

from cloister.core.errors import ConfigError
from cloister.privacy.mechanisms import MECHANISMS
from cloister.server.strategies import STRATEGIES
from cloister.tasks import TASKS

KNOWN = {"task": TASKS, "strategy": STRATEGIES, "mechanism": MECHANISMS}


def refuse_taken(kind: str, name: str) -> None:
    """Refuse the name of an installed plugin or package.

    With the same name, one of the two would become unreachable.

    Args:
        kind: task, strategy or mechanism; for other kinds, only packages are checked.
        name: of the plugin and of its package.

    Raises:
        ConfigError: the name is taken.
    """
    if kind in KNOWN and name in KNOWN[kind].names():
        raise ConfigError(f"the {kind} {name!r} is there already; choose another name")
    module = name.replace("-", "_")
    if module.isidentifier() and find_spec(module) is not None:
        raise ConfigError(f"the name {name!r} is that of an installed package, {module}; choose another")
