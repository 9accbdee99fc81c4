"""Privacy budget of a node: replies are charged in advance, and a node abstains if its budget is too small.

The node cannot verify the server's noise, and relies on the server's statement; it adds its own noise itself. The
parameters of a message may depend on the replies to earlier ones. Budgets therefore use a privacy filter that is fixed
in advance (`cloister.privacy.accounting.filters`).
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from cloister.client.charges import FURTHER, GROUPED, PROMISED, SCORES, Charge, charges_of, steps_by
from cloister.client.foreseen import foreseen
from cloister.client.heads import keep_head
from cloister.client.ledgers import folder_unnamed, keeps_ledger, ledger_of, warn_of_other_names
from cloister.client.mods.roles import refuse_other_role
from cloister.client.node import Node, NodeConfig
from cloister.client.policy import Policy
from cloister.client.request import EvaluateRequest, KeepRequest, ProtocolRequest, Request, TrainRequest
from cloister.client.tally import Tally
from cloister.config.privacy import PrivacyConfig
from cloister.config.section import kebab
from cloister.core.errors import BudgetExhausted, PolicyError
from cloister.core.wire import ADVERTISE
from cloister.privacy.accounting.budget import PrivacyBudget, Store
from cloister.privacy.accounting.filters import FilterKind
from cloister.privacy.accounting.ledger import Ledger, today
from cloister.privacy.accounting.vocabulary import Unit

ABSTAINS = (
    "no budget of this node covers this round: its own, or privacy.client-max-epsilon or privacy.max-leakage of the "
    "run. The node's log has the reason. More noise or fewer rounds cost less (cloister plan), but not after a release "
    "without a guarantee"
)
"""Error text that is independent of the budget and of its remainder."""


@contextmanager
def keep_budget(request: Request, node: Node) -> Iterator[None]:
    """Charge a reply before the block computes it; abstain beyond the node's budget.

    A node keeps a ledger if it has data of its own, a policy, or a setting that refers to a ledger. Any other node
    records the cost of its own noise in its state. Scores of a model carry no noise, so that a node with a budget sends
    none.

    Args:
        request: of the server.
        node: that replies.

    Raises:
        BudgetExhausted: the node abstains; the server receives an error reply that states it.
        PolicyError: the number of messages today has reached the policy's limit.
        PrivacyError: the node has recorded another role in the meantime.
    """
    if isinstance(request, KeepRequest):
        yield  # no data leaves
        return
    for name in ("max_epsilon", "max_example_epsilon") if isinstance(request, EvaluateRequest) else ():
        if getattr(node.config, name):
            raise BudgetExhausted(
                f"this node has a budget ({kebab(name)}), and scores on its examples would leave without noise"
            )
    with folder_unnamed(node.config), ExitStack() as stack:
        with _abstaining():
            # Record all releases or none; leaving the stack ends them.
            planned = _required(request, node)
            if keeps_ledger(node.config):
                warn_of_other_names(node.config, request.config.task.name)
            for budget, charge in planned:
                if not _own_budget(charge, node.config):
                    # Only here: otherwise a server could fill the ledger with the budgets of refused runs.
                    budget.begin(request.run)
                for number, event in enumerate(charge.events):
                    mechanism = FURTHER if number else charge.mechanism
                    stack.enter_context(budget.release(event, request.round, mechanism, charge.clip))
        if keeps_ledger(node.config) and isinstance(request, TrainRequest):
            ledger = ledger_of(node.config, request.config.task.name)
            keep_head(ledger.path, request)
            # Check again with this message counted, since others may have arrived concurrently.
            _refuse_beyond_today(ledger, node.policy, counted=1)
        yield


def foresee_budget(request: ProtocolRequest, node: Node) -> None:
    """Abstain early from a secure aggregation beyond the node's budget.

    Other members then do not rely on it. No release is charged here: the reply to the training request of this round is
    charged instead.

    Args:
        request: for a step of the protocol.
        node: that replies.

    Raises:
        BudgetExhausted: the node abstains, as in `keep_budget`.
        PolicyError: the number of messages today has reached the policy's limit.
        PrivacyError: the ledger contradicts the round.
    """
    if request.step == ADVERTISE:
        with folder_unnamed(node.config), _abstaining():
            _required(foreseen(request), node)


@contextmanager
def _abstaining() -> Iterator[None]:
    """Convert errors in the block to one text for all budgets.

    The remainder of a budget is private to the node. The original error is for this node's log
    (`cloister.client.mods.errors`).
    """
    try:
        yield
    except BudgetExhausted as error:
        raise BudgetExhausted(ABSTAINS) from error


def _required(request: Request, node: Node) -> list[tuple[PrivacyBudget[Store], Charge]]:
    """Return all charges of a reply, once all budgets cover them."""
    planned = list(planned_charges(request, node))
    for budget, charge in planned:
        budget.require(charge.events)
    return planned


def planned_charges(request: Request, node: Node) -> Iterator[tuple[PrivacyBudget[Store], Charge]]:
    """Yield each charge of a reply, with the budget that covers it.

    Args:
        request: of the server.
        node: that replies.

    Raises:
        PolicyError: the number of messages today has reached the policy's limit.
    """
    privacy = request.config.privacy
    ledger = ledger_of(node.config, request.config.task.name) if keeps_ledger(node.config) else None
    if ledger is not None and isinstance(request, TrainRequest):
        _refuse_beyond_today(ledger, node.policy)
    for charge in charges_of(request, node):
        delta, epsilon = _limit(charge, privacy, node.config)
        if ledger is None:
            if epsilon or privacy.client.is_on:
                tally = Tally(node.state)
                if isinstance(request, TrainRequest):
                    tally.catch_up(charge.unit, charge.events)
                yield PrivacyBudget[Store](tally, request.run, charge.unit, delta, epsilon, kind="renyi"), charge
            continue
        rule = partial(_refuse_contradiction, request, ledger, charge.unit if epsilon else None)
        # Rényi DP for pure releases, for which Gaussian DP is loose. The server's stated noise does not affect the
        # choice: a filter is permanent, and the server could otherwise choose it.
        own_pure = charge.mechanism != PROMISED and any(
            math.isfinite(event.parts()[0].pure("add-or-remove")) for event in charge.events
        )
        kind: FilterKind | None = "renyi" if own_pure else None
        budget = PrivacyBudget[Store](ledger, request.run, charge.unit, delta, epsilon, kind=kind, rule=rule)
        if own := _own_budget(charge, node.config):
            # Record only the site's budget: the first one fixes the filter, which no run may choose.
            ledger.limit(request.run, charge.unit, node.config.target_delta, own, budget.kind)
        yield budget, charge


def _refuse_contradiction(request: Request, ledger: Ledger, budgeted: Unit | None) -> None:
    """Raise PrivacyError if the ledger contradicts this reply, for any charge.

    Under a budget for examples it raises BudgetExhausted for releases about groups, and the reverse. The cost for an
    example does not bound that for a group of many, and a group's row may be exchanged for another. A budget for groups
    does not cover groups of another kind: one patient's rows may lie in many of them, each of which moves a sum by as
    much as the patient.
    """
    refuse_other_role(request, ledger)
    other: dict[Unit | None, Unit] = {"example": "group", "group": "example"}
    if budgeted in other and ledger.has_released(other[budgeted]):
        raise BudgetExhausted(
            f"{ledger.path} holds releases that were counted for each {other[budgeted]}: no budget for each {budgeted} "
            "covers them; if this is other data, give it another data-identity"
        )
    group = request.config.task.group
    if budgeted != "group" or not group:
        return
    counted = {entry.mechanism for entry in ledger.entries if entry.mechanism.startswith(GROUPED)}
    if others := sorted(counted - {steps_by(group)}):
        before = others[0].removeprefix(GROUPED)
        raise BudgetExhausted(
            f"{ledger.path} holds releases that were counted for groups by {before!r}: no budget for groups by "
            f"{group!r} covers them; if this is other data, give it another data-identity"
        )


def _own_budget(charge: Charge, node: NodeConfig) -> float:
    """Return the node's own budget for a unit; 0: none."""
    return node.max_epsilon if charge.unit == "client" else node.max_example_epsilon


def _limit(charge: Charge, privacy: PrivacyConfig, node: NodeConfig) -> tuple[float, float]:
    """Return the strictest δ and ε of the run's and the node's budgets.

    ε 0: neither exists. The run's `privacy.client-max-epsilon` limits each example (or group) with DP-SGD, and the
    client with noise on its update.
    """
    own = _own_budget(charge, node)
    of_run = privacy.client.max_epsilon if (charge.unit == "client") != privacy.client.clips_gradients else 0.0
    both = [(privacy.target_delta, of_run)] * bool(of_run) + [(node.target_delta, own)] * bool(own)
    if not both:
        return privacy.target_delta if privacy.client.has_delta else node.target_delta, 0.0
    return min(delta for delta, _ in both), min(epsilon for _, epsilon in both)


def _refuse_beyond_today(ledger: Ledger, policy: Policy | None, counted: int = 0) -> None:
    """Raise PolicyError if today's messages reach the policy's limit.

    Of today's messages, `counted` are disregarded.
    """
    if policy is None or not policy.max_messages_per_day:
        return
    answered = sum(
        entry.unit == "client" and entry.mechanism not in (SCORES, FURTHER) and entry.time == today()
        for entry in ledger.entries
    )
    if answered >= policy.max_messages_per_day + counted:
        raise PolicyError(
            f"refused by the policy of this node: max-messages-per-day = {policy.max_messages_per_day} were answered"
        )
