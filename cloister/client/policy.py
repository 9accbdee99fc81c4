"""A site's own rules: what a run must do before this node takes part in it.

The rules stand in a file of the site, `policy.toml`, whose path the node configuration gives as `policy`. The file is
read anew for every message, and it wins over the run configuration: a run that asks for less is refused here, whatever
the server says. What cannot be read or classified is refused too.
"""

import logging
import math
import tomllib
from logging import ERROR
from pathlib import Path
from typing import Annotated, Literal

from flwr.app import UserConfig
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cloister.core.errors import ConfigError, PolicyError
from cloister.core.explain import explained

POLICY = "policy"
"""The key of the node configuration that holds the path of the policy."""
CHECKED_BUNDLE = "CLOISTER_CHECKED_BUNDLE"
"""The environment variable in which the executor of a node says which app bundle it has looked at and lets run."""

Mechanism = Literal["global-dp", "metric", "dp-sgd", "laplace"]
SERVER_SIDE: tuple[Mechanism, ...] = ("global-dp", "metric")
NonNegative = Annotated[float, Field(ge=0)]
logger = logging.getLogger("cloister.client")

TEMPLATE = """\
# What a run must do before this site takes part in it. These rules win over whatever a run asks for.
# Every message is checked; a file that cannot be read refuses everything. 0 means: no limit, where nothing
# else is said.
# `cloister policy FILE` checks this file and says in words what it demands.

# At least one of these must be on in a run: "global-dp", "metric" (noise on the server), "dp-sgd", "laplace" (noise
# here). An empty list takes part in runs without any noise too: the server then sees this site's models as they are.
mechanisms = ["global-dp", "metric"]

# Tasks this site trains for.
tasks = ["digits"]

# Noise below which a mechanism counts as off. `server` is what the server promises for a round, all its releases of
# this site's update together; this site cannot check it. `client` is the noise of dp-sgd, which is added here.
min-server-noise-multiplier = 0.0
min-client-noise-multiplier = 0.0

# Largest epsilon of all runs on this data together, at this delta, by this site's own ledger: for the site as a whole
# by what servers promise, and for each example by the noise of dp-sgd that is added here. If the node configuration
# has the same key, the smaller number holds; of two deltas also.
max-epsilon = 0.0
max-example-epsilon = 0.0
target-delta = 1e-5

# Largest privacy.max-leakage that a run with "laplace" may have.
max-leakage = 0.0

# Smallest privacy.radius that a run with "laplace" may choose; the noise grows with it. 0: a run may choose none, and
# has to leave it at 0, which is how far training moved the model.
min-radius = 0.0

# Fewest examples this site trains on.
min-rows = 0

# Most local epochs of a round.
max-local-epochs = 0

# Whether scores of the model on this site's examples may leave. They carry no noise.
scores-may-leave = false

# SHA-256 of the app bundles that may run here; empty: any. `cloister warm-node` enforces it before it runs a bundle;
# `flower-supernode` alone cannot, and this site then refuses every run. See also its --trusted-entities.
allowed-fabs = []
"""
"""A policy with every key, for a site to edit."""


class Policy(BaseModel):
    """The rules of one site. `mechanisms` and `tasks` must be stated; what is left out of the rest is no limit.

    Args:
        mechanisms: at least one must be on, with its smallest noise; empty: none is insisted on.
        tasks: that a run may have.
        min_server_noise_multiplier: of all promised releases of a round together.
        min_client_noise_multiplier: of DP-SGD.
        max_epsilon, max_example_epsilon: over all runs on the node's data, for the node and for an example; 0: no
            budget.
        target_delta: at which it is judged.
        max_leakage: that a run with `laplace` may be configured for; 0: no limit.
        min_radius: that a run with `laplace` may choose; 0: it may choose none.
        min_rows: training examples the node must have.
        max_local_epochs: of a round; 0: no limit.
        scores_may_leave: whether evaluation replies are sent.
        allowed_fabs: SHA-256 digests of app bundles; empty: any.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=lambda name: name.replace("_", "-"),
        allow_inf_nan=False,
    )

    mechanisms: list[Mechanism]
    tasks: Annotated[list[str], Field(min_length=1)]
    min_server_noise_multiplier: NonNegative = 0.0
    min_client_noise_multiplier: NonNegative = 0.0
    max_epsilon: NonNegative = 0.0
    max_example_epsilon: NonNegative = 0.0
    target_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    max_leakage: NonNegative = 0.0
    min_radius: NonNegative = 0.0
    min_rows: Annotated[int, Field(ge=0)] = 0
    max_local_epochs: Annotated[int, Field(ge=0)] = 0
    scores_may_leave: bool = False
    allowed_fabs: list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = []

    @model_validator(mode="after")
    def _agree(self) -> "Policy":
        """Refuse a floor under a mechanism that is not insisted on: it would bind nobody."""
        floors: dict[str, tuple[float, tuple[Mechanism, ...]]] = {
            "min-server-noise-multiplier": (self.min_server_noise_multiplier, SERVER_SIDE),
            "min-client-noise-multiplier": (self.min_client_noise_multiplier, ("dp-sgd",)),
            "min-radius": (self.min_radius, ("laplace",)),
        }
        for key, (floor, mechanisms) in floors.items():
            if floor and not set(mechanisms) & set(self.mechanisms):
                names = " or ".join(repr(name) for name in mechanisms)
                raise ValueError(f"{key} = {floor:g} has no effect unless mechanisms holds {names}")
        return self


def policy_of(node: UserConfig) -> Policy | None:
    """The policy that a node configuration names; None if it names none.

    Raises:
        PolicyError: it names one that cannot be read.
    """
    if POLICY not in node:
        return None
    try:
        return read_policy(Path(str(node[POLICY])))
    except ConfigError as error:
        logger.log(ERROR, "%s", error)
        raise PolicyError(
            "the policy of this node cannot be read, so it takes part in nothing; details are in its log"
        ) from None


def read_policy(path: Path) -> Policy:
    """The policy in a file.

    Raises:
        ConfigError: there is no such file, or it is no policy: each bad key is named, with what was found.
    """
    try:
        content = tomllib.loads(path.expanduser().read_text())
        return Policy.model_validate(content)
    except OSError as error:
        raise ConfigError(f"policy {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"policy {path} is no TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError("\n".join(f"policy {path}: {line}" for line in _lines(error))) from None


def _lines(error: ValidationError) -> list[str]:
    return [explained(item, lambda _: Policy) for item in error.errors()]


def budgets_of(node: UserConfig, budget: float, example_budget: float, delta: float) -> tuple[float, float, float]:
    """Both budgets and δ in force: the stricter of the given ones and the policy's; a budget of 0 is none."""
    policy = policy_of(node)
    if policy is None or not (policy.max_epsilon or policy.max_example_epsilon):
        return budget, example_budget, delta
    stricter = (_stricter(budget, policy.max_epsilon), _stricter(example_budget, policy.max_example_epsilon))
    return *stricter, min(delta, policy.target_delta)


def _stricter(one: float, other: float) -> float:
    return min(one or math.inf, other or math.inf) if one or other else 0.0


def in_words(policy: Policy) -> list[str]:
    """What a policy demands, a line each; a line that begins with `!` says what it does not prevent."""
    lines = [f"tasks: {', '.join(policy.tasks)}", *_noise_in_words(policy)]
    if policy.max_epsilon:
        lines.append(f"at most ε = {policy.max_epsilon:g} at δ = {policy.target_delta:g} over all runs on this data")
    if policy.max_example_epsilon:
        lines.append(f"for an example at most ε = {policy.max_example_epsilon:g} at δ = {policy.target_delta:g}")
    if policy.max_leakage:
        lines.append(f"laplace: privacy.max-leakage at most {policy.max_leakage:g}")
    if policy.min_radius:
        lines.append(f"laplace: privacy.radius 0 or at least {policy.min_radius:g}")
    if policy.min_rows:
        lines.append(f"at least {policy.min_rows} examples to train on")
    if policy.max_local_epochs:
        lines.append(f"at most {policy.max_local_epochs} local epochs a round")
    lines.append("! scores may leave, without noise" if policy.scores_may_leave else "no scores leave")
    fabs = [f"app bundle {digest}" for digest in policy.allowed_fabs]
    return lines + (fabs or ["! any app bundle may run, also one that obeys no policy"])


def _noise_in_words(policy: Policy) -> list[str]:
    if not policy.mechanisms:
        return ["! runs without noise are taken part in: the server sees this site's models"]
    floors = {"dp-sgd": policy.min_client_noise_multiplier, "laplace": 0.0}
    named = [(name, floors.get(name, policy.min_server_noise_multiplier)) for name in policy.mechanisms]
    words = [f"{name} with at least {floor:g}" if floor else f"{name} with any noise" for name, floor in named]
    believed = set(SERVER_SIDE) & set(policy.mechanisms)
    return ["noise: " + ", or ".join(words)] + (["! noise of the server is believed, not seen"] if believed else [])
