"""Node configuration, read strictly, and the node for one message."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from flwr.app import Context, RecordDict
from pydantic import ConfigDict, Field, model_validator

from cloister.client.policy import Policy, policy_of
from cloister.config.io import Count, Heading, Inner, NonNegative, Scalar, Section, Whole, checked
from cloister.utils.errors import NodeConfigError
from cloister.utils.files import expanded

MAXIMUM_SIZE = 10**9
Place = Annotated[str, Field(min_length=1)]
"""Path of a file or a folder."""


class NodeConfig(Section):
    """Settings of `flower-supernode --node-config`.

    Args:
        data_path: file of the node's own data; empty: it has none.
        partition_id, num_partitions: index of a simulated client's part of a benchmark, from 0, and number of parts.
        ledger_dir: folder of its ledgers, and of the secret that its data is split by.
        data_identity: name of the data in the ledger; empty: a digest.
        max_epsilon, max_example_epsilon: over all runs, for the node and for an example or group; 0: no budget.
        target_delta: δ of these budgets.
        max_leakage: largest total leakage of its noised models; 0: no limit.
        min_radius: smallest radius of a run that a node with a limit of leakage takes part in.
        public_size: public number of units; 0: not stated.
        group: the array with the group of each row; a run with DP-SGD must protect groups by it. Empty: rows are units.
        policy: path of the site's policy; empty: there is none.
        model_dir: folder of its personal model; empty: it saves none.
        signing_key: file of the private key that the site signs with in secure aggregations; empty: it has none.
        roster: file of the signed roster of who takes part in them.
        roster_key: file of the public key of the roster's signer; empty: the policy's `peers` alone count.
        node_key: file of the private key by which the SuperNode authenticates; the node signs replies with it. Empty:
            it signs none.
        secure_state: folder in memory, for what is kept of a secure aggregation between messages; empty: none is kept.
        device: that PyTorch models compute on; `auto`: a GPU if there is one.
    """

    # Accept only the documented spelling of a key: `LocalGrid.is_simulated` reads the raw keys.
    model_config = ConfigDict(populate_by_name=False)

    data_path: Place = ""
    partition_id: Whole | None = None
    num_partitions: Count | None = None
    ledger_dir: Place = "~/.cloister/ledgers"
    data_identity: Annotated[str, Field(pattern=r"^[\w.-]+$")] = ""
    max_epsilon: NonNegative = 0.0
    max_example_epsilon: NonNegative = 0.0
    target_delta: Inner = 1e-5
    max_leakage: NonNegative = 0.0
    min_radius: NonNegative = 0.0
    public_size: Annotated[int, Field(ge=0, le=MAXIMUM_SIZE)] = 0
    group: Heading = ""
    policy: Place = ""
    model_dir: Place = ""
    signing_key: Place = ""
    roster: Place = ""
    roster_key: Place = ""
    node_key: Place = ""
    secure_state: Place = ""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"

    @model_validator(mode="after")
    def _agree(self) -> "NodeConfig":
        if self.num_partitions is not None and (self.partition_id or 0) >= self.num_partitions:
            raise ValueError(f"partition-id = {self.partition_id} must be below num-partitions = {self.num_partitions}")
        if bool(self.signing_key) != bool(self.roster) or (self.roster_key and not self.roster):
            found = {key: getattr(self, key.replace("-", "_")) for key in ("signing-key", "roster", "roster-key")}
            told = ", ".join(f"{key} = {value!r}" for key, value in found.items() if value)
            raise ValueError(f"{told}: signing-key and roster come together, and roster-key with them")
        return self

    @property
    def ledger_folder(self) -> Path:
        """Return the folder of the ledgers, absolute."""
        return expanded(self.ledger_dir).resolve()

    @property
    def has_limit(self) -> bool:
        """Return whether there is a budget, or a limit of leakage."""
        return any((self.max_epsilon, self.max_example_epsilon, self.max_leakage))

    def under(self, policy: Policy | None) -> "NodeConfig":
        """Return the configuration with the stricter of both budgets.

        Size and groups are the policy's, where it has any.
        """
        if policy is None:
            return self
        values: dict[str, Scalar] = {
            "public_size": policy.public_size or self.public_size,
            "group": policy.group or self.group,
            "max_epsilon": stricter(self.max_epsilon, policy.max_epsilon),
            "max_example_epsilon": stricter(self.max_example_epsilon, policy.max_example_epsilon),
        }
        # The policy's default δ counts only if the policy has a budget.
        if policy.has_budget or "target_delta" in policy.model_fields_set:
            values["target_delta"] = min(self.target_delta, policy.target_delta)
        return self.model_copy(update=values)


def stricter(one: float, other: float) -> float:
    """Return the smaller of two limits, where 0 means no limit."""
    return min(one or math.inf, other or math.inf) if one or other else 0.0


def node_of(said: Mapping[str, object]) -> NodeConfig:
    """Return the validated configuration of a node.

    Raises:
        NodeConfigError: with each invalid key, its value and the valid ones, for the node's operator only.
    """
    return checked(NodeConfig, said, "node configuration: ", NodeConfigError)


@dataclass(frozen=True)
class Node:
    """This node, as one message finds it.

    Attributes:
        config: with the stricter of its own budgets and the policy's.
        policy: of the site; None: there is none.
        id: among the nodes of the federation.
        state: stored between messages if the node keeps no ledger.
    """

    config: NodeConfig
    policy: Policy | None
    id: int
    state: RecordDict

    @classmethod
    def of(cls, context: Context) -> "Node":
        """Return the node of a message, with its configuration and policy read anew.

        Raises:
            NodeConfigError: its configuration is not valid.
            PolicyError: its policy cannot be read.
        """
        config = node_of(context.node_config)
        policy = policy_of(config.policy)
        return cls(config.under(policy), policy, context.node_id, context.state)

    @property
    def owner(self) -> int:
        """Return the number that separates its shuffles and seeded noise.

        It is its part of a benchmark, or its id.
        """
        return self.id if self.config.partition_id is None else self.config.partition_id
