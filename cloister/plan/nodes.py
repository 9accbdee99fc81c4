"""Nodes of a planned run: the first message's requests to them, and their sizes.

A node here is a simulated client with its part of the task's data, or a site that states its size. Its answers come
from the node's own code: request parsing, policy, charges.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import environ
from pathlib import Path

from flwr.app import Context, Message, RecordDict

from cloister.client.charges import planned_steps, unit_of
from cloister.client.mods.enforce import enforce_policy
from cloister.client.node import Node
from cloister.client.policy import CHECKED_BUNDLE, read_policy
from cloister.client.request import TrainRequest, request_of
from cloister.config.run import RunConfig
from cloister.config.section import Scalar
from cloister.core.errors import ConfigError, PolicyError
from cloister.flower.messages import LOCAL_RUN
from cloister.privacy.accounting.vocabulary import Unit
from cloister.privacy.dpsgd.local_steps import LocalSteps


@dataclass(frozen=True)
class Asked:
    """Node that is asked to train in the first round.

    Attributes:
        request: of the server, as the node parses it.
        node: as it is before the run.
    """

    request: TrainRequest
    node: Node

    @property
    def unit(self) -> Unit:
        """Return the unit that the node protects in addition to itself."""
        return unit_of(self.request, self.node)

    @property
    def steps(self) -> LocalSteps:
        """Return the private steps of a round.

        They follow from the node's stated size, or from its part in a simulation.

        Raises:
            PrivacyError: batches would reveal the true size.
        """
        return planned_steps(self.request, self.node)

    @property
    def refusal(self) -> str:
        """Return the reason for which the node's policy refuses the run.

        It is empty if the policy allows the run, or if there is no policy.
        """
        with _bundle_checked(self.node):
            try:
                enforce_policy(self.request, self.node)
            except PolicyError as error:
                return str(error)
        return ""


def configurations(
    config: RunConfig, clients: int, sizes: Sequence[int], policy: Path | None
) -> list[dict[str, Scalar]]:
    """Return the node configurations of a run.

    Args:
        config: of the run.
        clients: number of clients.
        sizes: that sites state of their data; empty: clients are simulated, or the policy states a size.
        policy: of every node; None: no policy.

    Raises:
        ConfigError: the policy cannot be read, or states another size.
    """
    rules = {} if policy is None else {"policy": str(policy)}
    read = read_policy(policy) if policy else None
    stated = read.public_size if read and config.privacy.client.clips_gradients else 0
    if sizes and stated:
        raise ConfigError(f"--public-size {sizes[0]} has no effect: the policy states public-size = {stated}")
    if sizes or stated:
        # Only the stated size of a site is used: its data is not read.
        return [{"data-path": "not-read", "public-size": size, **rules} for size in sizes or [stated]]
    return [{"partition-id": index, "num-partitions": clients, **rules} for index in range(clients)]


def asked(config: RunConfig, message: Message, nodes: Sequence[dict[str, Scalar]], folder: Path) -> list[Asked]:
    """Return the nodes with these configurations, each asked to train by this message.

    Args:
        config: of the run.
        message: of the first round.
        nodes: their configurations.
        folder: replaces the ledger folder of nodes with a policy.
    """
    own: dict[str, Scalar] = {"ledger-dir": str(folder)}
    settings = config.flat()
    contexts = [
        Context(LOCAL_RUN, number, node | (own if "policy" in node else {}), RecordDict(), dict(settings))
        for number, node in enumerate(nodes, start=1)
    ]
    return [Asked(request_of(TrainRequest, message, context), Node.of(context)) for context in contexts]


@contextmanager
def _bundle_checked(node: Node) -> Iterator[None]:
    """Run the block as if the node's executor had verified an allowed app bundle.

    A plan has no bundle.
    """
    before, allowed = environ.get(CHECKED_BUNDLE), node.policy.allowed_fabs if node.policy else []
    try:
        if allowed:
            environ[CHECKED_BUNDLE] = allowed[0]
        yield
    finally:
        if before is None:
            environ.pop(CHECKED_BUNDLE, None)
        else:
            environ[CHECKED_BUNDLE] = before
