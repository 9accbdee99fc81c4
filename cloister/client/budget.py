"""Privacy budget and role of a node: replies are charged in advance, and a node abstains if its budget is too small.

The node cannot verify the server's noise, and relies on the server's statement; it adds its own noise itself. The
parameters of a message may depend on the replies to earlier ones. Budgets therefore use a privacy filter that is
fixed in advance (`cloister.privacy.accounting.filters`).

Held-out clients send scores on their own examples without noise. That is harmless for examples that the model has
not seen. The scores of a node that has trained would reveal what its noise hides. The server cannot enforce this:
nodes without registered keys return under another id. The node itself therefore refuses the second role.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from cloister.client.costs import FURTHER, GROUPED, PROMISED, SCORES, PrivacyCost, privacy_costs_of, steps_by
from cloister.client.enforce import planned_train_request
from cloister.client.ledgers import (
    InMemoryLedger,
    folder_unnamed,
    keeps_ledger,
    ledger_of,
    save_server_head,
    warn_of_other_names,
)
from cloister.client.node import Node, NodeConfig
from cloister.client.policy import Policy
from cloister.client.request import EvaluateRequest, KeepRequest, ProtocolRequest, Request, TrainRequest
from cloister.config.io import kebab
from cloister.config.privacy import PrivacyConfig
from cloister.privacy.accounting.budget import PrivacyBudget, Store, recorded
from cloister.privacy.accounting.events import Unaccounted
from cloister.privacy.accounting.filters import FilterKind
from cloister.privacy.accounting.ledger import Ledger, today
from cloister.privacy.accounting.vocabulary import Unit
from cloister.utils.errors import BudgetExhausted, PolicyError, PrivacyError
from cloister.utils.wire import ADVERTISE, ASSUMED, HELD_OUT, config_of

STATE = "roles"
TRAINED, SCORED = "trained", "scored-in-run"


def keep_role(request: Request, node: Node) -> None:
    """Refuse a second role in a run that holds clients out.

    A node does not evaluate after training under a guarantee, nor train in a run after evaluating in it. The rule
    applies to runs that hold clients out and protect the others. A node with a ledger checks the releases about its
    data, over all runs, and again when its reply is recorded. A simulated node stores its role in its state.

    Raises:
        PrivacyError: the node has had the other role.
    """
    if not _has_roles(request):
        return
    if keeps_ledger(node.config):
        with folder_unnamed(node.config):
            refuse_other_role(request, ledger_of(node.config, request.config.task.name))
        return
    roles, assumed = (config_of(node.state, name) for name in (STATE, ASSUMED))
    trained = bool(roles.get(TRAINED)) or assumed.get(HELD_OUT) is False
    _refuse(request, trained, roles.get(SCORED) == request.run or assumed.get(HELD_OUT) is True)
    node.state[STATE] = roles
    if isinstance(request, TrainRequest):
        roles[TRAINED] = True
    elif isinstance(request, EvaluateRequest):
        roles[SCORED] = request.run


def refuse_other_role(request: Request, ledger: Ledger) -> None:
    """Refuse a request for another role than the one in the node's ledger.

    Args:
        request: of any run.
        ledger: of the node.

    Raises:
        PrivacyError: the request is to evaluate, and the data was ever trained on under a guarantee; or it is to train,
            and the data was evaluated on in this run.
    """
    if _has_roles(request):
        trained = any(not isinstance(entry.event, Unaccounted) for entry in ledger.entries)
        scored = any(entry.mechanism == SCORES and entry.run == request.run for entry in ledger.entries)
        _refuse(request, trained, scored)


def _has_roles(request: Request) -> bool:
    return bool(request.config.evaluation.held_out_clients and request.config.is_private)


def _refuse(request: Request, trained: bool, scored: bool) -> None:
    if isinstance(request, EvaluateRequest) and trained:
        raise PrivacyError(
            "this node has trained under a guarantee, and is no held-out client: its scores do not leave"
        )
    if isinstance(request, TrainRequest) and scored:
        raise PrivacyError("this node has scored models of this run as a held-out client, and does not train in it")


ABSTAINS = (
    "no budget of this node covers this round: its own, or privacy.client-max-epsilon or privacy.max-leakage of the "
    "run. The node's log has the reason, and what is left of ε. More noise or a larger budget may help; cloister plan "
    "counts no spent ε of nodes"
)
"""Error text that is independent of the budget and of its remainder."""


@contextmanager
def keep_budget(request: Request, node: Node) -> Iterator[list[PrivacyCost]]:
    """Charge a reply before the block computes it, and yield the charges; abstain beyond the node's budget.

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
        yield []  # no data leaves
        return
    for name in ("max_epsilon", "max_example_epsilon") if isinstance(request, EvaluateRequest) else ():
        if getattr(node.config, name):
            raise BudgetExhausted(
                f"this node has a budget ({kebab(name)}), and scores on its examples would leave without noise"
            )
    with folder_unnamed(node.config), ExitStack() as stack:
        ledger = ledger_of(node.config, request.config.task.name) if keeps_ledger(node.config) else None
        with _abstaining():
            planned = _required(request, node)
            if ledger is not None:
                warn_of_other_names(ledger, node.config, request.config.task.name)
            for budget, charge in planned:
                if not _own_budget(charge, node.config):
                    # Only here: otherwise a server could fill the ledger with the budgets of refused runs.
                    budget.begin(request.run)
            openings = [
                [
                    budget.opening(event, request.round, FURTHER if number else charge.mechanism, charge.clip)
                    for number, event in enumerate(charge.events)
                ]
                for budget, charge in planned
            ]
            stack.enter_context(recorded([(budget, own) for (budget, _), own in zip(planned, openings, strict=True)]))
        if ledger is not None and isinstance(request, TrainRequest):
            save_server_head(ledger.path, request)
            # Check again with this message counted, since others may have arrived concurrently.
            _refuse_beyond_today(ledger, node.policy, counted=1)
        yield [charge for _, charge in planned]


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
            _required(planned_train_request(request), node)


@contextmanager
def _abstaining() -> Iterator[None]:
    """Convert errors in the block to one text for all budgets.

    The remainder of a budget is private to the node. The original error is for this node's log
    (`cloister.client.mods`).
    """
    try:
        yield
    except BudgetExhausted as error:
        raise BudgetExhausted(ABSTAINS) from error


def _required(request: Request, node: Node) -> list[tuple[PrivacyBudget[Store], PrivacyCost]]:
    """Return all charges of a reply, once all budgets cover them."""
    planned = list(planned_charges(request, node))
    for budget, charge in planned:
        budget.require(charge.events)
    return planned


def planned_charges(request: Request, node: Node) -> Iterator[tuple[PrivacyBudget[Store], PrivacyCost]]:
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
    for charge in privacy_costs_of(request, node):
        delta, epsilon = _limit(charge, privacy, node.config)
        if ledger is None:
            if epsilon or privacy.client.is_on:
                tally = InMemoryLedger(node.state)
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


def _own_budget(charge: PrivacyCost, node: NodeConfig) -> float:
    """Return the node's own budget for a unit; 0: none."""
    return node.max_epsilon if charge.unit == "client" else node.max_example_epsilon


def _limit(charge: PrivacyCost, privacy: PrivacyConfig, node: NodeConfig) -> tuple[float, float]:
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
