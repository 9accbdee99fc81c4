"""The mod that holds every message against the node's policy, before anything is computed."""

import math
import os
from collections.abc import Iterator

from flwr.app import ConfigRecord, Context, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable

from cloister.client.books import promised
from cloister.client.data import local_data, task_of
from cloister.client.handlers import run_config
from cloister.client.plan import PublicSettings, TrainingPlan
from cloister.client.policy import CHECKED_BUNDLE, SERVER_SIDE, Mechanism, Policy, policy_of
from cloister.core.config import RunConfig
from cloister.core.errors import PolicyError
from cloister.core.wire import CONFIG
from cloister.privacy.events import Gaussian


def obey_policy(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Refuse a message that asks for less than the node's policy does; pass on the rest.

    Raises:
        PolicyError: it does, or the policy cannot be read. The text names what was asked for and what is demanded;
            how many examples the node has is not said, and what is wrong with a policy stays in the node's log.
    """
    policy = policy_of(context.node_config)
    if policy is None:
        return call_next(message, context)
    if complaints := list(_complaints(policy, message, context)):
        raise PolicyError("refused by the policy of this node: " + "; ".join(complaints))
    return call_next(message, context)


def _complaints(policy: Policy, message: Message, context: Context) -> Iterator[str]:
    kind, config = message.metadata.message_type, run_config(context)
    if config.task.name not in policy.tasks:
        # Nothing else can be judged: the task's data is not touched.
        yield f"task.name = {config.task.name!r}, allowed: {', '.join(policy.tasks)}"
    elif policy.allowed_fabs and os.environ.get(CHECKED_BUNDLE) not in policy.allowed_fabs:
        yield "allowed-fabs is enforced by `cloister warm-node` alone, and this message did not come through it"
    elif kind == MessageType.TRAIN:
        yield from _about_training(policy, message, context, config)
    elif kind == MessageType.QUERY:
        return  # the node keeps a model of its own, and nothing leaves
    elif kind != MessageType.EVALUATE:
        yield f"a {kind!r} message is none that a policy knows"
    elif not policy.scores_may_leave:
        yield "scores of a model on its examples may not leave"


def _about_training(policy: Policy, message: Message, context: Context, config: RunConfig) -> Iterator[str]:
    public = message.content.config_records[CONFIG]
    settings = PublicSettings.of(public)
    yield from _about_noise(policy, config, public)
    yield from _about_leakage(policy, config)
    plan = TrainingPlan.of(config.client, task_of(config.task).recipe, settings, 0)
    if policy.max_local_epochs and plan.epochs > policy.max_local_epochs:
        yield f"client.local-epochs = {plan.epochs}, demanded: at most {policy.max_local_epochs}"
    if policy.min_rows and len(local_data(config.task, context.node_config, settings.seed).train) < policy.min_rows:
        yield "this node has fewer examples than it demands of itself"


def _about_noise(policy: Policy, config: RunConfig, public: ConfigRecord) -> Iterator[str]:
    """Why no mechanism of the list is on; nothing if one is, or if none is insisted on."""
    reasons = [_why_off(name, policy, config, public) for name in policy.mechanisms]
    if all(reasons):
        yield from reasons


def _why_off(name: Mechanism, policy: Policy, config: RunConfig, public: ConfigRecord) -> str:
    """Why a mechanism does not count as on; empty if it does."""
    side = "server" if name in SERVER_SIDE else "client"
    # A side or a key that this version does not know is off.
    found = config.flat().get(f"privacy.{side}", "none")
    if found != name:
        return f"privacy.{side} = {found!r}, not {name!r}"
    if (seed := config.privacy.noise_seed) != -1:
        return f"privacy.noise-seed = {seed} is noise that whoever knows the seed can remove, demanded: -1"
    return _server_noise(policy, config, public) if side == "server" else _client_noise(name, policy, config)


def _server_noise(policy: Policy, config: RunConfig, public: ConfigRecord) -> str:
    floor, promise = policy.min_server_noise_multiplier, promised_multiplier(public)
    if config.privacy.noise_multiplier == 0:
        return "privacy.noise-multiplier = 0 is no noise"
    if promise < floor:
        return f"the server promises a noise multiplier of {promise:.4g}, demanded: at least {floor:g}"
    return ""


def _client_noise(name: Mechanism, policy: Policy, config: RunConfig) -> str:
    floor = policy.min_client_noise_multiplier if name == "dp-sgd" else 0.0
    found = config.flat().get("privacy.client-noise-multiplier", 0.0)
    if not isinstance(found, int | float) or not found > 0:
        return f"privacy.client-noise-multiplier = {found!r}, demanded: a number above 0"
    if found < floor:
        return f"privacy.client-noise-multiplier = {found:g}, demanded: at least {floor:g}"
    return _laplace_radius(policy, config) if name == "laplace" else ""


def _laplace_radius(policy: Policy, config: RunConfig) -> str:
    """Why a radius that the run chose is too small; 0 is how far training moved the model, which no run chooses.

    The noise grows with the radius, and what is counted as leaked does not: next to no radius is next to no noise. With
    `per-layer` every array has the radius by itself, and noise of that size.
    """
    found = config.flat().get("privacy.radius", 0.0)
    if found == 0:
        return ""
    if not policy.min_radius:
        return f"privacy.radius = {found:g}, demanded: 0, as this node has no min-radius"
    if not isinstance(found, int | float) or not found >= policy.min_radius:
        return f"privacy.radius = {found!r}, demanded: 0 or at least {policy.min_radius:g}"
    return ""


def promised_multiplier(public: ConfigRecord) -> float:
    """The multiplier z that all promised releases amount to, 1/z² = Σ 1/zᵢ²; 0 if nothing is promised.

    Raises:
        PrivacyError: the promise is none.
    """
    multipliers = [event.noise_multiplier for event in promised(public) if isinstance(event, Gaussian)]
    return 1 / math.sqrt(sum(z**-2 for z in multipliers)) if multipliers else 0.0


def _about_leakage(policy: Policy, config: RunConfig) -> Iterator[str]:
    settings = config.flat()
    if not policy.max_leakage or settings.get("privacy.client") != "laplace":
        return
    found = settings.get("privacy.max-leakage", 0.0)
    if not isinstance(found, int | float) or not 0 < found <= policy.max_leakage:
        yield f"privacy.max-leakage = {found!r}, demanded: above 0 and at most {policy.max_leakage:g}"
