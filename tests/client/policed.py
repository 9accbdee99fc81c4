"""Requests held against a policy, and policies for it."""

import pytest
from asking import (
    CLUSTERED,
    node_at,
    policy_file,
    request_of_kind,
)

from cloister.client.enforce import enforce_policy
from cloister.client.policy import is_server_side
from cloister.client.request import TrainRequest
from cloister.privacy.accounting.events import Gaussian, Pure
from cloister.utils.errors import PolicyError

BUNDLE = "0" * 64
REFUSED = "refused by the policy of this node: "
ANY = {"mechanisms": [], "min_server_noise_multiplier": None}
"""A policy without a mechanism, for the other rules."""
CHOICE = CLUSTERED | {"privacy.client": "gaussian", "privacy.clusters": 2, "privacy.choice-epsilon": 0.5}


def ask(folder, settings, kind=TrainRequest, promise=(), configured=None, **changes):
    """Check a request against the policy; an error if it refuses."""
    node = {"policy": str(policy_file(folder, **changes)), "partition-id": 0, "num-partitions": 4} | (configured or {})
    events = tuple(event if isinstance(event, Pure) else Gaussian(event) for event in promise)
    more = {"promise": events} if promise else {}
    request = request_of_kind(kind, settings, **more)
    enforce_policy(request, node_at(settings, node))


def refused(says, *arguments, **changes):
    with pytest.raises(PolicyError, match=says) as refusal:
        ask(*arguments, **changes)
    return str(refusal.value)


def only(mechanism, **changes):
    """A policy that insists on one mechanism, and on a budget that no noise is too little for."""
    budget = "max_epsilon" if is_server_side(mechanism) else "max_example_epsilon"
    return {"mechanisms": [mechanism], "min_server_noise_multiplier": None, budget: 1e6} | changes
