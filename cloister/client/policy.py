"""Policy of a site: requirements that a run must meet before this node takes part in it.

The rules are in a file of the site, `policy.toml`, whose path is `policy` in the node configuration. The file is read
anew for every message and overrides the run configuration. A run that violates it is refused here, for any message of
the server. Settings that cannot be read or classified are refused too.
"""

import logging
import re
from collections.abc import Mapping
from logging import ERROR
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from cloister.config.io import Heading, Inner, NonNegative, Section, Whole, kebab, read_toml
from cloister.config.renamed import with_own_floors
from cloister.utils.errors import ConfigError, PolicyError
from cloister.utils.files import expanded
from cloister.utils.text import at_least, at_most, suggestion

CHECKED_BUNDLE = "CLOISTER_CHECKED_BUNDLE"
"""Environment variable with the app bundle that the node's executor has verified and admitted."""

SERVER_SIDE = ("global-dp", "metric")
MECHANISMS = (*SERVER_SIDE, "dp-sgd", "gaussian", "laplace")
PLUGIN = "server:"
"""Prefix for a server mechanism of another package, which this node need not have installed."""
logger = logging.getLogger("cloister.client")


def _known(name: str) -> str:
    """Refuse the name of a mechanism that can never be on.

    It may be misspelt.
    """
    theirs = name.removeprefix(PLUGIN)
    if name not in MECHANISMS and (theirs == name or theirs in ("", "none", "laplace-clustering")):
        known = ", ".join(map(repr, MECHANISMS))
        raise ValueError(
            f"mechanisms holds {name!r}{suggestion(name, MECHANISMS)}; known: {known}, or '{PLUGIN}NAME' for a "
            "mechanism of another package on the server"
        )
    return name


def _fingerprint(found: str) -> str:
    if not re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}", found):
        raise ValueError(f"peers holds {found!r}, which is no fingerprint as ssh-keygen -l prints it")
    return found


def is_server_side(mechanism: str) -> bool:
    """Return whether the server adds the noise of this mechanism."""
    return mechanism in SERVER_SIDE or mechanism.startswith(PLUGIN)


class Policy(Section):
    """Rules of one site. `mechanisms` and `tasks` are required; any other omitted rule sets no limit.

    Args:
        mechanisms: at least one must be on, with its smallest noise; empty: none is required.
        tasks: allowed tasks.
        public_size: public number of units of the site's data; 0: not stated.
        group: the array with the group of each row; a run must protect groups by it. Empty: rows are units.
        min_server_noise_multiplier: of all promised releases of a round together.
        min_dp_sgd_noise_multiplier: σ of DP-SGD.
        min_gaussian_noise_multiplier, min_laplace_noise_multiplier: z and ν of noise on the update.
        max_epsilon, max_example_epsilon: over all runs on the node's data, for the node and for an example or group;
            0: no budget.
        target_delta: δ of these budgets.
        max_leakage: largest `privacy.max-leakage` of a run with `laplace`; 0: no limit.
        min_radius, max_radius: allowed radius of a run with `laplace`; a minimum of 0: no radius is allowed.
        min_client_clipping_norm, max_client_clipping_norm: S of DP-SGD, C of local Gaussian noise and of a sum.
        max_learning_rate, min_batch_size, max_batch_size, max_local_epochs, max_steps: of training in one round.
        max_test_fraction: largest share of its examples that a run may hold out on the node.
        max_group_cap: largest number of a group's examples that a run may train on.
        max_hypotheses: models of a run with clusters.
        max_choice_epsilon: ε of one private choice among them.
        max_messages_per_day: training messages.
        min_rows: smallest number of examples, true or stated.
        min_reply_seconds: smallest time between a message and its reply.
        scores_may_leave: whether evaluation replies are sent.
        allowed_fabs: SHA-256 digests of app bundles; empty: any.
        demands_secure_aggregation: whether the server may receive only the sum of updates.
        min_threshold: smallest number of clients in a sum.
        min_colluding, max_colluding: number of clients that may collude with the server under the claim of a run.
        peers: fingerprints of the signing keys of all members of the roster, by name; empty: only its signature counts.
    """

    mechanisms: list[Annotated[str, AfterValidator(_known)]]
    tasks: Annotated[list[str], Field(min_length=1)]
    public_size: Whole = 0
    group: Heading = ""
    min_server_noise_multiplier: NonNegative = 0.0
    min_dp_sgd_noise_multiplier: NonNegative = 0.0
    min_gaussian_noise_multiplier: NonNegative = 0.0
    min_laplace_noise_multiplier: NonNegative = 0.0
    max_epsilon: NonNegative = 0.0
    max_example_epsilon: NonNegative = 0.0
    target_delta: Inner = 1e-5
    max_leakage: NonNegative = 0.0
    min_radius: NonNegative = 0.0
    max_radius: NonNegative = 0.0
    min_client_clipping_norm: NonNegative = 0.0
    max_client_clipping_norm: NonNegative = 0.0
    max_learning_rate: NonNegative = 0.0
    min_batch_size: Whole = 0
    max_batch_size: Whole = 0
    max_local_epochs: Whole = 0
    max_steps: Whole = 0
    max_test_fraction: NonNegative = 0.0
    max_group_cap: Whole = 0
    max_hypotheses: Whole = 0
    max_choice_epsilon: NonNegative = 0.0
    max_messages_per_day: Whole = 0
    min_rows: Whole = 0
    min_reply_seconds: NonNegative = 0.0
    scores_may_leave: bool = False
    allowed_fabs: list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = Field(default_factory=list)
    demands_secure_aggregation: bool = False
    min_threshold: Whole = 0
    min_colluding: Whole = 0
    max_colluding: Whole = 0
    peers: dict[str, Annotated[str, AfterValidator(_fingerprint)]] = Field(default_factory=dict)

    @property
    def believed(self) -> list[str]:
        """Return the listed server mechanisms, whose noise the node cannot verify."""
        return [name for name in self.mechanisms if is_server_side(name)]

    @property
    def has_budget(self) -> bool:
        """Return whether the policy limits ε."""
        return bool(self.max_epsilon or self.max_example_epsilon)

    def smallest_noise(self, mechanism: str) -> float:
        """Return the smallest noise multiplier of a listed mechanism; 0: any noise."""
        rule = "server" if is_server_side(mechanism) else mechanism.replace("-", "_")
        return float(getattr(self, f"min_{rule}_noise_multiplier"))

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, rules: Mapping[str, object]) -> dict[str, object]:
        return with_own_floors(rules)

    @model_validator(mode="after")
    def _agree(self) -> "Policy":
        """Reject idle minima, mechanisms without a bound, and empty ranges."""
        for name, mechanisms in MINIMA.items():
            here = self.believed if mechanisms == SERVER_SIDE else set(mechanisms) & set(self.mechanisms)
            if (minimum := getattr(self, name)) and not here:
                named = (*mechanisms, f"{PLUGIN}NAME") if mechanisms == SERVER_SIDE else mechanisms
                names = " or ".join(map(repr, named))
                raise ValueError(f"{kebab(name)} = {minimum:g} has no effect unless mechanisms holds {names}")
        for mechanism in self.mechanisms:
            words, rules = BOUNDS.get(mechanism, BOUND_OF_SERVER)
            if not any(getattr(self, rule) for rule in rules):
                raise ValueError(f"mechanisms holds {mechanism!r}, and no noise is too little for it: state {words}")
        for name in ("radius", "client_clipping_norm", "batch_size", "colluding"):
            minimum, maximum = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if maximum and minimum > maximum:
                raise ValueError(f"min-{kebab(name)} = {minimum:g} must be at most max-{kebab(name)} = {maximum:g}")
        return self


MINIMA: dict[str, tuple[str, ...]] = {
    "min_server_noise_multiplier": SERVER_SIDE,
    "min_dp_sgd_noise_multiplier": ("dp-sgd",),
    "min_gaussian_noise_multiplier": ("gaussian",),
    "min_laplace_noise_multiplier": ("laplace",),
    "min_radius": ("laplace",),
}
"""Minima, each with the mechanisms that it applies to."""
_OF_SERVER = ("min_server_noise_multiplier", "max_epsilon")
_BUDGETS = ("max_epsilon", "max_example_epsilon")
BOUND_OF_SERVER = ("min-server-noise-multiplier or max-epsilon", _OF_SERVER)
BOUNDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dp-sgd": ("min-dp-sgd-noise-multiplier or a budget", ("min_dp_sgd_noise_multiplier", *_BUDGETS)),
    "gaussian": ("min-gaussian-noise-multiplier or a budget", ("min_gaussian_noise_multiplier", *_BUDGETS)),
    "laplace": (
        "min-laplace-noise-multiplier, max-leakage or a budget",
        ("min_laplace_noise_multiplier", "max_leakage", *_BUDGETS),
    ),
}
"""Lower bounds on the noise of a node's mechanism: in words, and as rules of which one must be set."""


def policy_of(path: str) -> Policy | None:
    """Return the policy of a node's configuration; None for an empty path.

    Raises:
        PolicyError: the policy cannot be read.
    """
    if not path:
        return None
    try:
        return read_policy(Path(path))
    except ConfigError as error:
        logger.log(ERROR, "%s", error)
        raise PolicyError(
            "the policy of this node cannot be read, so it takes part in nothing; details are in its log"
        ) from None


def read_policy(path: Path) -> Policy:
    """Return the policy in a file.

    Raises:
        ConfigError: the file is absent or invalid; with each invalid key and its value.
    """
    return read_toml(Policy, expanded(path), f"policy {path}")


def render(policy: Policy) -> list[str]:
    """Return the rules of a policy, a line each; `!` begins a remaining risk."""
    lines = [f"tasks: {', '.join(policy.tasks)}"]
    if policy.mechanisms:
        named = [(name, policy.smallest_noise(name)) for name in policy.mechanisms]
        words = [f"{name} with {f'at least {at_least(least, 6)}' if least else 'any noise'}" for name, least in named]
        lines.append("noise: " + ", or ".join(words))
        whose = "other clients add" if policy.demands_secure_aggregation else "server adds"
        lines += [f"! this site cannot check the noise that the {whose}"] if policy.believed else []
    else:
        seen = "" if policy.demands_secure_aggregation else ": the server sees its models"
        lines.append(f"! this site takes part in runs without noise{seen}")
    if policy.peers:
        lines.append(f"in secure aggregations {len(policy.peers)} fingerprints of members are pinned")
    if policy.demands_secure_aggregation:
        lines.append("secure aggregation: the server must see a sum of several clients' updates only")
        if not policy.min_threshold:
            lines.append("! a sum may be of as few clients as the run says: set min-threshold")
        if not policy.min_colluding:
            lines.append("! a run need not hold against a server that has a client on its side: set min-colluding")
        if not policy.peers:
            lines.append("! the signer of the roster can invent clients, and so see what this site sends: pin peers")
    lines += _budgets(policy)
    for key, (minimum, maximum) in RANGES.items():
        low, high = getattr(policy, minimum, 0), getattr(policy, maximum, 0)
        bounds = [f"at least {at_least(low, 6)}"] * bool(low) + [f"at most {at_most(high, 6)}"] * bool(high)
        if bounds:
            lines.append(f"{key}: {' and '.join(bounds)}")
    if policy.max_steps and not policy.public_size:
        lines.append(
            "! steps are counted from public-size: a node with data of its own has to state it, or trains nothing"
        )
    if policy.min_rows:
        lines.append(f"at least {policy.min_rows} examples to train on")
    if policy.min_reply_seconds:
        lines.append(f"no reply sooner than {policy.min_reply_seconds:g} s after the message")
    lines.append("! scores may leave, without noise" if policy.scores_may_leave else "no scores leave")
    fabs = [f"app bundle {digest}" for digest in policy.allowed_fabs]
    return [*lines, *(fabs or ["! any app bundle may run, also one that ignores this policy"]), *_learnable(policy)]


def _budgets(policy: Policy) -> list[str]:
    unit = policy.group or "example"
    at = f"at δ = {at_most(policy.target_delta)} over all runs on this data"
    lines = [f"each {policy.group} is protected as a whole"] if policy.group else []
    if policy.max_epsilon:
        lines.append(f"for the site at most ε = {at_most(policy.max_epsilon, 6)} {at}")
    if policy.max_example_epsilon:
        lines.append(f"for each {unit} at most ε = {at_most(policy.max_example_epsilon, 6)} {at}")
    if not policy.has_budget:
        lines.append("! no budget: this site takes part in every run within these rules, however many there are")
    if policy.max_leakage:
        lines.append(f"laplace: privacy.max-leakage at most {at_most(policy.max_leakage, 6)}")
    if policy.public_size:
        lines.append(f"this site says that it has {policy.public_size} {unit}s")
    return lines


RANGES = {
    "secure-aggregation.threshold": ("min_threshold", ""),
    "secure-aggregation.colluding": ("min_colluding", "max_colluding"),
    "privacy.radius of laplace": ("min_radius", "max_radius"),
    "what this node clips to (clipping norm of dp-sgd or gaussian, privacy.clipping-norm of a sum)": (
        "min_client_clipping_norm",
        "max_client_clipping_norm",
    ),
    "client.learning-rate": ("", "max_learning_rate"),
    "client.batch-size": ("min_batch_size", "max_batch_size"),
    "client.local-epochs": ("", "max_local_epochs"),
    "steps of training in a round": ("", "max_steps"),
    "task.test-fraction": ("", "max_test_fraction"),
    "privacy.group-cap": ("", "max_group_cap"),
    "privacy.clusters": ("", "max_hypotheses"),
    "privacy.choice-epsilon": ("", "max_choice_epsilon"),
    "training messages a day": ("", "max_messages_per_day"),
}
"""Bounded settings, with the fields of the policy that bound them."""


def _learnable(policy: Policy) -> list[str]:
    """Return warnings of what a malicious server learns despite all rules."""
    if not policy.allowed_fabs:
        return ["! a server that ships its own code learns everything: no rule of this policy binds that code"]
    lines = ["! a malicious server learns that this node is connected, when it replies, and by which rule it refuses"]
    if (policy.believed or not policy.mechanisms) and not policy.demands_secure_aggregation:
        lines.append(
            "! the server sees the site's trained model as it is, in every round of a run whose noise the server adds"
        )
    if "laplace" in policy.mechanisms and not policy.min_radius:
        lines.append(
            "! noise of laplace without a radius follows from how far training moved the model, which is data: "
            "set min-radius"
        )
    if "dp-sgd" in policy.mechanisms and not policy.group:
        lines.append(
            "! a person with several examples is protected by less than ε says: set group, if there are such people"
        )
    if not policy.min_reply_seconds:
        lines.append("! a malicious server learns roughly how many examples there are, from how long training takes")
    return lines
