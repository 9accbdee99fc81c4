"""Verification of every request against the node's policy. Only `min-rows`, and simulations, read data for it."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace

from cloister.client.data import dealt, local_data
from cloister.client.keys import identity
from cloister.client.node import Node
from cloister.client.policy import CHECKED_BUNDLE, PLUGIN, Policy, is_server_side
from cloister.client.request import EvaluateRequest, ProtocolRequest, Request, TrainRequest
from cloister.client.trainers import model_and_trainer_of, requested_plan, run_recipe
from cloister.config.privacy import ENABLED, SecureAggregationConfig
from cloister.config.run import RunConfig
from cloister.privacy.accounting.budget import multiplier_of
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.privacy.mechanisms.distributed.steps import DistributedStep
from cloister.utils.arrays import Layout
from cloister.utils.errors import PolicyError
from cloister.utils.keys import REMEDY, provisioner_of
from cloister.utils.wire import ADVERTISE

ROUNDING = 1e-9
"""Relative tolerance for noise below the required minimum: squares and their roots round."""


def enforce_policy(request: Request, node: Node) -> None:
    """Refuse a request that violates the node's policy or its groups.

    Raises:
        PolicyError: the request violates it. The text contains the requested and the required values.
    """
    policy = node.policy
    if policy is None:
        for complaint in _about_group(request, node):
            raise PolicyError(f"refused by this node: {complaint}")
        return
    # Only runs without other complaints build a model and count rows. A refusal must not describe the data.
    complaints = list(_complaints(policy, request, node))
    if not complaints and isinstance(request, ProtocolRequest) and request.step == ADVERTISE:
        # Before other members rely on this node.
        complaints = list(_about_training(policy, planned_train_request(request), node))
    if not complaints and isinstance(request, TrainRequest) and policy.min_rows:
        few = _rows(request, node) < policy.min_rows
        complaints = ["this node has fewer examples than it demands of itself"] if few else []
    if complaints:
        raise PolicyError("refused by the policy of this node: " + "; ".join(complaints))


def _complaints(policy: Policy, request: Request, node: Node) -> Iterator[str]:
    config = request.config
    if config.task.name not in policy.tasks:
        # Without the task no other rule can be checked.
        yield f"task.name = {config.task.name!r}, allowed: {', '.join(policy.tasks)}"
        return
    if policy.allowed_fabs and os.environ.get(CHECKED_BUNDLE) not in policy.allowed_fabs:
        yield "allowed-fabs is enforced by `cloister warm-node` alone, and this message did not come through it"
        return
    privacy, smallest, largest = config.privacy, policy.min_client_clipping_norm, policy.max_client_clipping_norm
    if privacy.client.has_delta:
        yield from _outside(f"privacy.{privacy.client.name}-clipping-norm", privacy.client.bound, smallest, largest)
    if privacy.client.clips_gradients:
        # S of every round lies between both norms: it decays from the first and never falls below the second.
        decays = smallest if privacy.dp_sgd.clipping_decay else 0
        yield from _outside("privacy.min-clipping-norm", privacy.dp_sgd.min_clipping_norm, decays, largest)
    if config.task.group:
        yield from _outside("privacy.group-cap", privacy.dp_sgd.group_cap, 0, policy.max_group_cap)
    yield from _outside("task.test-fraction", config.task.held_back, 0, policy.max_test_fraction)
    if privacy.server.hypotheses:
        yield from _outside("privacy.clusters", privacy.server.hypotheses, 0, policy.max_hypotheses)
    if privacy.chooses_privately:
        yield from _outside("privacy.choice-epsilon", privacy.choice_epsilon, 0, policy.max_choice_epsilon)
        if not (policy.max_choice_epsilon or policy.has_budget):
            yield (
                f"privacy.clusters = {privacy.server.hypotheses}: a choice among hypotheses is a release, and no rule "
                "of this policy limits it; state max-choice-epsilon or a budget in policy.toml"
            )
    if isinstance(request, TrainRequest | ProtocolRequest):
        yield from about_secure_sums(policy, config.secure_aggregation if config.secure_aggregation.enabled else None)
        # The bound is 0 without clipping for a sum.
        yield from _outside("clipping-norm", request.bound, smallest if request.bound else 0, largest)
    if isinstance(request, TrainRequest):
        yield from _about_training(policy, request, node)
    elif isinstance(request, EvaluateRequest) and not policy.scores_may_leave:
        yield "scores of a model on its examples may not leave"


def _about_training(policy: Policy, request: TrainRequest, node: Node) -> Iterator[str]:
    config, privacy, request = request.config, request.config.privacy, by_own_roster(request, node)
    reasons = [_why_off(name, policy, request) for name in policy.mechanisms]
    if reasons and all(reasons):
        # One mechanism is enough; without this prefix each reason would read as a separate demand.
        none = f"none of {', '.join(policy.mechanisms)} is on as demanded: " if len(reasons) > 1 else ""
        yield none + "; ".join(reasons)
    leakage = privacy.client.max_leakage
    if policy.max_leakage and privacy.client.counts_leakage and not 0 < leakage <= policy.max_leakage:
        yield f"privacy.max-leakage = {leakage!r}, demanded: above 0 and at most {policy.max_leakage:g}"
    size = node.config.public_size
    if not node.config.data_path and (policy.max_steps or config.sums_gradients):
        # A simulation's partition is public. DP-SGD counts units, other training counts examples.
        if privacy.client.clips_gradients:
            size = dealt(config.task, node.config, request.seed)
        else:
            size = max(1, len(local_data(config.task, node.config, request.seed, tolerant=True).train))
    plan = requested_plan(request, 0, size)
    # The rate bounds every epoch of a schedule. Factors on losses multiply steps, unless gradients are clipped after
    # them.
    yield from _outside("client.learning-rate", plan.learning_rate, 0, policy.max_learning_rate)
    weight = run_recipe(config).maximum_weight
    if weight > 1 and not privacy.client.clips_gradients:
        what = "client.learning-rate times the largest of client.class-weights and client.loss-scale"
        yield from _outside(what, plan.learning_rate * weight, 0, policy.max_learning_rate)
    yield from _outside("client.batch-size", plan.batch_size, policy.min_batch_size, policy.max_batch_size)
    yield from _outside("client.local-epochs", plan.epochs, 0, policy.max_local_epochs)
    if policy.max_steps and size:
        steps = privacy.dp_sgd.steps if privacy.client.clips_gradients else LocalSteps
        yield from _outside("steps of training", steps(size, plan.batch_size, plan.epochs).count, 0, policy.max_steps)
    elif policy.max_steps:
        yield f"max-steps = {policy.max_steps} is counted from public-size, which this node does not state"
    yield from _about_group(request, node)


def _about_group(request: Request, node: Node) -> Iterator[str]:
    """Yield a complaint about a unit other than the site's own.

    No server may choose the unit of a budget. A node without a policy, a budget for each unit and groups of its own
    accepts the run's unit.
    """
    config, own = request.config, node.config
    is_stated = node.policy or own.max_example_epsilon or own.group
    is_about = isinstance(request, TrainRequest) and config.privacy.client.clips_gradients
    if is_about and is_stated and config.task.group != own.group:
        unnamed = "" if own.group else ", as this node names no group of its own"
        yield f"task.group = {config.task.group!r}, demanded: {own.group!r}{unnamed}"


def about_secure_sums(policy: Policy, asked: SecureAggregationConfig | None) -> Iterator[str]:
    """Yield violations of a policy's rules on secure aggregation.

    Args:
        policy: of the site.
        asked: the run's settings of it; None: the server receives every update.
    """
    if asked is None:
        if policy.demands_secure_aggregation:
            yield "secure-aggregation.enabled = False, demanded: True"
        return
    yield from _outside("secure-aggregation.threshold", asked.threshold, policy.min_threshold, 0)
    yield from _outside("secure-aggregation.colluding", asked.colluding, policy.min_colluding, policy.max_colluding)


def _rows(request: TrainRequest, node: Node) -> float:
    """Return the number of examples to compare with a minimum.

    With DP-SGD it is the public size. It is infinite where `cloister.client.app` checks the minimum instead.
    """
    client = request.config.privacy.client
    if client.clips_gradients:
        return node.config.public_size or math.inf
    if client.is_on or request.config.secure_aggregation.enabled:
        return math.inf  # app.py checks it, and local noise or the sum hides the result
    if node.config.has_limit:
        return math.inf  # a limit may refuse the run first; after the charge, app.py checks it
    return len(local_data(request.config.task, node.config, request.seed).train)


def _outside(key: str, found: float, minimum: float, maximum: float) -> Iterator[str]:
    if minimum and found < minimum:
        yield f"{key} = {found:g}, demanded: at least {minimum:g}"
    if maximum and found > maximum:
        yield f"{key} = {found:g}, demanded: at most {maximum:g}"


def _why_off(name: str, policy: Policy, request: TrainRequest) -> str:
    """Return why a mechanism does not count as on; empty if it does."""
    privacy = request.config.privacy
    side = "server" if is_server_side(name) else "client"
    found = privacy.server.name if side == "server" else privacy.client.name
    if found != name.removeprefix(PLUGIN):
        return f"privacy.{side} = {found!r}, not {name!r}"
    if privacy.noise_seed != -1:
        return f"privacy.noise-seed = {privacy.noise_seed} is noise that a party with the seed can remove, demanded: -1"
    if side == "client" and privacy.chooses_exactly:
        return f"privacy.choice = {privacy.choice!r} tells the server which hypothesis suits, demanded: 'private'"
    if side == "server":
        minimum, promise = policy.smallest_noise(name), multiplier_of(request.promise)
        if privacy.server.is_silent:
            return "privacy.noise-multiplier = 0 is no noise"
        less = f"a noise multiplier of {promise:.4g}, demanded: at least {minimum:g}"
        is_too_little = promise < minimum * (1 - ROUNDING)
        if is_too_little and request.by_provisioner:
            maker = provisioner_of(request.by_provisioner)
            return f"one share of the noise counts, {less}, against {maker}; {REMEDY}"
        return f"the server promises {less}" if is_too_little else ""
    key, multiplier = privacy.client.noise_key, privacy.client.noise_multiplier
    if not multiplier:
        return f"{key} = {multiplier!r}, demanded: a number above 0"
    if name == "laplace":
        return _laplace_noise(policy, request.config)
    if isinstance(shared := request.config.shared_release, DistributedStep):
        if not policy.min_colluding:
            return f"{ENABLED} = True: other members add a part of the noise, and this policy sets no min-colluding"
        parameters = Layout.of(request.models[0]).size
        multiplier = shared.dp_sgd.multiplier(parameters, len(request.by_provisioner))
        key = f"{key}, as it counts here,"
    return next(_outside(key, multiplier, policy.smallest_noise(name), 0), "")


def _laplace_noise(policy: Policy, config: RunConfig) -> str:
    """Return why this Laplace noise is insufficient; empty if it is sufficient.

    The noise grows with the radius, and the charged leakage does not. With `per-layer` every array has the whole
    radius, and noise of that size. A radius of 0 means the length of the update. A server could then send a model that
    one specific row moves, and recognise that row. A site with a minimum therefore refuses a radius of 0.
    """
    client, radius = config.privacy.client, config.privacy.client.bound
    minimum = policy.smallest_noise(client.name)
    if too_little := next(_outside(client.noise_key, client.noise_multiplier, minimum, 0), ""):
        return too_little
    if radius == 0 and not policy.min_radius:
        return ""
    if not policy.min_radius:
        return f"privacy.radius = {radius:g}, demanded: 0, as this node has no min-radius"
    return next(_outside("privacy.radius", radius, policy.min_radius, policy.max_radius), "")


def planned_train_request(request: ProtocolRequest) -> TrainRequest:
    """Return the training request of the same round.

    Its release is that by this node's share of the noise.

    Args:
        request: for the first step.
    """
    arrays = model_and_trainer_of(request.config).model.arrays()
    shared = request.config.shared_release
    return TrainRequest(
        config=request.config,
        run=request.run,
        round=request.round,
        seed=request.seed,
        models=(arrays,),
        promise=shared.events(Layout.of(arrays)) if shared else (),
        bound=request.bound,
        distance=request.distance,
    )


def by_own_roster(request: TrainRequest, node: Node) -> TrainRequest:
    """Return the request with this node's own releases.

    They depend on who made the members' keys. The provisioner can act as the members whose keys it made. If they exceed
    the configured number of colluding members, the node counts on its own share of the noise only.

    Args:
        request: of the server.
        node: that replies. One without a signing key is simulated, or refuses the next step.

    Raises:
        NodeConfigError, PolicyError: as `identity`.
    """
    shared = request.config.shared_release
    who = identity(node.config) if shared else None
    names = who.roster.by_provisioner if who else ()
    if shared is None or len(names) <= request.config.secure_aggregation.colluding:
        return request
    releases = shared.events(Layout.of(request.models[0]), by_provisioner=len(names))
    return replace(request, promise=releases, by_provisioner=names)
