"""Statements of the server about its clients: attested mechanisms, claims about them, and personal models."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from cloister.config.run import RunConfig
from cloister.flower.messages import ErrorCode
from cloister.privacy.claims.claim import CLIENT_BUDGET, ClientClaim
from cloister.privacy.claims.client import gaussian_claim, laplace_claim
from cloister.privacy.claims.premises import BUNDLE, MAX_BYTES, Attestation, known_by, size_and_checked
from cloister.privacy.dpsgd.local_steps import Holders, LocalDpSgd, LocalSteps
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, PublishedLaplace
from cloister.server.build import Plan
from cloister.server.secure_steps import SecureSteps
from cloister.utils.arrays import Layout, State
from cloister.utils.errors import ConfigError, PrivacyError
from cloister.utils.wire import ARRAYS, ATTESTATION, CONFIG, HYPOTHESES, config_of

DECLINED = (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.LOAD_CLIENT_APP_EXCEPTION)
"""Error codes of a node whose client sent nothing. The SuperLink and the grid use other codes."""
AS_ASKED = "as this run asks for it"
SAVING_SECONDS = 60.0
"""Seconds that the end of a run waits for nodes to save their personal models."""


class Attested:
    """Counter of training requests by the attestation in their replies; it does not store which node attested.

    A request without a readable reply in time counts as one without an attestation: its client may have trained, and
    its model may have left the node. A request that the node declined does not count.

    Args:
        secret: whether the draw of clients is secret. Each attestation then counts once, since numbers would reveal it.
    """

    def __init__(self, secret: bool = False) -> None:
        self.secret = secret
        self._replies: Counter[str] = Counter()

    def counted(self, asked: Sequence[Message], replies: Iterable[Message]) -> Iterator[Message]:
        """Yield each reply after counting it; at the end, count the requests without a reply.

        Args:
            asked: requests to train.
            replies: at most one to each request.
        """
        missing = len(asked)
        try:
            for reply in replies:
                if reply.has_error():
                    missing -= reply.error.code in DECLINED
                else:
                    missing -= 1
                    stated = config_of(reply.content, ATTESTATION).get(ATTESTATION)
                    self._add(stated.hex() if isinstance(stated, bytes) and len(stated) <= MAX_BYTES else "", 1)
                yield reply
        finally:
            self._add("", missing)

    def _add(self, name: str, count: int) -> None:
        if count > 0:
            self._replies[name] = 1 if self.secret else self._replies[name] + count

    def by_statement(self) -> dict[bytes, int]:
        """Return the number of requests by the attestation in their reply; empty bytes: without an attestation."""
        return {bytes.fromhex(name): count for name, count in self._replies.items()}

    def state_dict(self) -> State:
        """Return the counts, for a resumed run."""
        return {"replies": np.frombuffer(json.dumps(self._replies).encode(), np.uint8)}

    def load_state_dict(self, state: State) -> None:
        """Restore the counts; the state of an older version counts as one reply without an attestation."""
        self._replies = Counter(json.loads(state["replies"].tobytes()) if state else {"": 1})


def personalise(grid: Grid, arrays: ArrayRecord, public: Mapping[str, str | int], hypotheses: int) -> None:
    """Send the final model or hypotheses to every connected node, which stores its own; replies are ignored.

    Args:
        grid: to the clients.
        arrays: of the model, or of all hypotheses.
        public: configuration in every message of the run.
        hypotheses: their number; 0: one model.
    """
    several = {HYPOTHESES: hypotheses} if hypotheses else {}
    content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({**public, **several})})
    messages = [Message(content, node, MessageType.QUERY) for node in grid.get_node_ids()]
    for message in messages:
        message.metadata.ttl = SAVING_SECONDS
    for _ in grid.send_and_receive(messages, timeout=SAVING_SECONDS):
        pass  # replies are ignored


@runtime_checkable
class SimulatedGrid(Protocol):
    """Grid that distributes the data of a benchmark, and so has the sizes of its nodes' data."""

    def units(self, config: RunConfig, seed: int) -> list[NDArray]:
        """Return the examples or groups of each node, by number or name; empty if a node has data of its own."""


def sizes_known(plan: Plan, grid: Grid) -> tuple[LocalSteps, ...]:
    """Return the private steps of each client in a round; empty unless this process distributes their data.

    Args:
        plan: of the run.
        grid: to the clients.
    """
    if not plan.config.privacy.client.clips_gradients or not isinstance(grid, SimulatedGrid):
        return ()
    return tuple(private_steps(plan, len(units)) for units in grid.units(plan.config, plan.seed))


def shared_units(plan: Plan, grid: Grid) -> frozenset[Holders] | None:
    """Return the holders of each example or group that several clients have: the combinations of their steps.

    Args: as `sizes_known`.

    Returns:
        None if they are unknown.
    """
    if not plan.config.privacy.client.clips_gradients or not isinstance(grid, SimulatedGrid):
        return None
    held = grid.units(plan.config, plan.seed)
    if not held:
        return None
    steps = [private_steps(plan, len(units)) for units in held]
    _, places, counts = np.unique(np.concatenate(held), return_inverse=True, return_counts=True)
    clients = np.repeat(np.arange(len(held)), list(map(len, held)))
    by_unit = np.split(clients[np.argsort(places, kind="stable")], np.cumsum(counts)[:-1])
    several = {tuple(by_unit[unit].tolist()) for unit in np.flatnonzero(counts > 1)}
    return frozenset(
        tuple(sorted((steps[client] for client in holders), key=lambda each: each.examples)) for holders in several
    )


def private_steps(plan: Plan, units: int) -> LocalSteps:
    """Return the private steps in a round of a client with this number of examples or groups.

    Args:
        plan: of the run.
        units: their public number.
    """
    return plan.config.privacy.dp_sgd.steps(max(1, units), plan.recipe.batch_size, plan.recipe.local_epochs)


def client_claim(
    plan: Plan,
    layout: Layout,
    rounds: int,
    sizes: Sequence[LocalSteps] | None = None,
    shared: Collection[Holders] | None = None,
    attested: Attested | None = None,
) -> ClientClaim | None:
    """Return the claim about the clients' own mechanism; None without one.

    The claim covers only the clients whose replies attest the releases that this run requests, with the sizes that they
    attest.

    Args:
        plan: of the run.
        layout: of everything that the server sends, all hypotheses.
        rounds: number of rounds with requests to train.
        sizes: the private steps of the clients in a round, with `dp-sgd`; None or empty: they are unknown, and several
            sizes serve as examples.
        shared: result of `shared_units`.
        attested: attestations of the nodes; None: the run has not begun.

    Raises:
        ConfigError: the mechanism has no claim.
    """
    privacy = plan.config.privacy
    if not privacy.client.is_on:
        return None
    if attested is None or not rounds:
        claim = _claim(plan, layout, rounds, sizes, shared)
    else:
        heard = attested.by_statement()
        covered = {said: asked for said in heard if (asked := _asked_for(said, plan, layout)) is not None}
        of_sites = covered.values() if privacy.client.clips_gradients else ()
        stated = [private_steps(plan, asked.size) for asked in of_sites]
        of_all = _claim(plan, layout, rounds, sizes or stated, shared)
        claim = _covering(of_all, heard, covered, attested.secret)
    claim = replace(claim, premises=(*claim.premises, *plan.resumed_on))
    return claim.without_guarantee(_beside_the_noise(plan, bool(shared)))


def _claim(
    plan: Plan,
    layout: Layout,
    rounds: int,
    sizes: Sequence[LocalSteps] | None,
    shared: Collection[Holders] | None,
) -> ClientClaim:
    """Return the claim about clients that apply the mechanism of the run; arguments and errors of `client_claim`."""
    privacy = plan.config.privacy
    mechanism, circumstances = privacy.client.noise_on_update, privacy.circumstances
    claim: ClientClaim
    if privacy.client.clips_gradients:
        from cloister.privacy.claims.client import dp_sgd_claim, standing_for_all

        dp_sgd = _dp_sgd(plan, layout)
        if sizes:
            steps = standing_for_all(sizes, dp_sgd, rounds, privacy.target_delta, shared or ())
        else:
            steps = tuple(private_steps(plan, units) for units in dp_sgd.sizes_shown(plan.recipe.batch_size))
        makers = plan.strategy.by_provisioner if isinstance(plan.strategy, SecureSteps) else None
        claim = dp_sgd_claim(dp_sgd, steps, rounds, privacy.target_delta, privacy.circumstances, shared, makers)
        claim = replace(claim, known=bool(sizes))
    elif isinstance(mechanism, LocalGaussian):
        claim = gaussian_claim(mechanism, rounds, privacy.target_delta, circumstances)
    elif isinstance(mechanism, LocalLaplace | PublishedLaplace):
        # A client adds noise to the one hypothesis that it sends: p is its size.
        parameters = layout.size // max(1, plan.hypotheses)
        # A node without a ledger treats a resumed run as a new one, and applies the limit again.
        counts = 1 + plan.resumes
        claim = laplace_claim(mechanism, parameters, rounds, circumstances, privacy.client.max_leakage, counts)
    else:
        raise ConfigError(f"privacy.client = {privacy.client.name!r} has no claim")
    limit = privacy.client.max_epsilon
    return replace(claim, parameters={**claim.parameters, CLIENT_BUDGET: limit}) if limit else claim


def _dp_sgd(plan: Plan, layout: Layout) -> LocalDpSgd:
    """Return the mechanism of the clients, with the noise that counts.

    That is less than the configured noise if the provisioner made the keys of too many members.

    Args:
        plan: of the run.
        layout: of the model.

    Raises:
        PrivacyError: no shares of this noise can be made.
    """
    if isinstance(plan.strategy, SecureSteps):
        plan.strategy.mechanism.plan(layout.size)  # refuses noise that no shares can make, before the run
        return replace(plan.strategy.mechanism.dp_sgd, noise_multiplier=plan.strategy.multiplier(layout))
    return plan.config.privacy.dp_sgd.mechanism(plan.config.task.group)


def _covering(
    claim: ClientClaim, heard: Mapping[bytes, int], covered: Mapping[bytes, Attestation], secret: bool
) -> ClientClaim:
    """Return the claim with the clients that it does not cover, and the covered clients' premise of the bundle.

    If no client is covered, the claim has no guarantee.

    Args:
        claim: about all clients.
        heard: number of requests by the attestation in their reply; empty: there were no requests.
        covered: attestations of the releases that the run requests.
        secret: whether numbers of replies are secret.
    """
    others = sum(count for said, count in heard.items() if said not in covered)
    if heard and not covered:
        return claim.without_guarantee([f"no reply states that its client applied {claim.mechanism} {AS_ASKED}"])
    told = "some requests" if secret else f"{others} of {sum(heard.values())} requests"
    missing = (
        f"the clients of {told}: no reply that was read in time states that they applied {claim.mechanism} {AS_ASKED}"
    )
    # The code of the bundle attests this, and the server ships that code. Shares of noise come from all clients.
    checked = bool(covered) and all(asked.checked for asked in covered.values()) and not claim.is_against_server
    premises = known_by(claim.premises, [BUNDLE.known_as("stated")] if checked else [])
    return replace(claim, not_covered=missing if others else "", premises=premises)


def _asked_for(said: bytes, plan: Plan, layout: Layout) -> Attestation | None:
    """Return the attestation of a reply if this run requests it from a client of its size; otherwise None."""
    if (found := size_and_checked(said)) is None:
        return None
    size, checked = found
    privacy, group = plan.config.privacy, plan.config.task.group
    try:
        if privacy.client.clips_gradients:
            steps, dp_sgd = private_steps(plan, size), _dp_sgd(plan, layout)
            unit = "group" if group else "example"
            events = privacy.circumstances.events(dp_sgd.caveats(), lambda: [steps.event(dp_sgd.noise_multiplier)])
        else:
            mechanism, parameters = privacy.client.noise_on_update, layout.size // max(1, plan.hypotheses)
            assert mechanism is not None
            unit, events = (
                "client",
                privacy.circumstances.events(mechanism.caveats(), lambda: mechanism.events(parameters)),
            )
    except (ConfigError, PrivacyError):
        return None  # a size that no client of this run can have
    asked = Attestation(privacy.client.name, unit, events, size, group, checked)
    return asked if asked.to_bytes() == said else None


def _beside_the_noise(plan: Plan, are_shared: bool) -> Iterator[str]:
    """Yield the releases of clients that their own noise does not cover."""
    if are_shared and plan.config.privacy.chooses_privately:
        yield "several clients hold data of one unit, and each chooses among hypotheses: no bound on their sum is shown"
    if are_shared and plan.config.evaluation.held_out_clients:
        yield "several clients hold data of one person, and scores of those that never train leave without noise"
    if plan.config.evaluates_on_clients and not plan.config.evaluation.held_out_clients:
        yield "scores of models on the clients' own examples leave without noise"
    if plan.held_out is not None and plan.held_out.newcomers:
        yield (
            "nodes were connected after roles had been dealt out: one that has no lasting memory of its data may have "
            "come back under a new id, and both trained and sent scores without noise"
        )
