"""Whom DP-SGD protects on a node, and how many of them it says there are.

A unit is an example, or with `task.group` a group of examples (a patient's, a writer's). How many there are shows in the
rate of batches and in the number of steps, so on a node with data of its own it is a constant that its operator states.
"""

from flwr.app import UserConfig

from cloister.client.data import DATA_PATH
from cloister.client.policy import policy_of
from cloister.core.errors import ConfigError, PrivacyError

PUBLIC_SIZE = "public-size"
MAXIMUM_SIZE = 10**9


def public_size_of(node: UserConfig) -> int:
    """The number of units that a node states, by its policy or by its configuration; 0: it states none.

    Raises:
        ConfigError: the configuration's is no whole number of at least 0.
        PolicyError: the policy cannot be read.
    """
    policy, stated = policy_of(node), node.get(PUBLIC_SIZE, 0)
    if type(stated) is not int or not 0 <= stated <= MAXIMUM_SIZE:
        raise ConfigError(f"{PUBLIC_SIZE} = {stated!r} in the node configuration must be a whole number of at least 0")
    return (policy.public_size if policy else 0) or stated


def size_of(node: UserConfig) -> int:
    """The number of units that DP-SGD on this node is planned for; 0: as many as a simulation deals it.

    Raises:
        PrivacyError: the node has data of its own and does not state how much.
    """
    stated = public_size_of(node)
    if DATA_PATH in node and not stated:
        raise PrivacyError(
            f"this node has data of its own and states no {PUBLIC_SIZE}, in its policy or its configuration: the noise "
            "of dp-sgd would show how many examples it has"
        )
    return stated if DATA_PATH in node else 0
