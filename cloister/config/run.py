"""Run configuration: dotted keys, parsed once into frozen, typed sections.

Flower passes one flat mapping of scalars (`[tool.flwr.app.config]` and the overrides of `flwr run`). All code after
`parse` uses `RunConfig`. If the task or the strategy decides a value, its default is `"auto"`.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_serializer, model_validator

from cloister.config import variants
from cloister.config.io import (
    INVALID,
    Auto,
    Count,
    Fraction,
    Heading,
    Positive,
    Scalar,
    Section,
    Share,
    Whole,
    checked,
    flatten,
    kebab,
    read_options,
)
from cloister.config.privacy import DEFAULTS, ENABLED, PrivacyConfig, SecureAggregationConfig, with_parties
from cloister.config.renamed import RENAMED, refusal
from cloister.privacy.mechanisms.distributed.shared import SharedRelease
from cloister.privacy.mechanisms.distributed.shares import COLLUDING, LARGEST_MULTIPLIER, THRESHOLD
from cloister.privacy.mechanisms.distributed.steps import SAMPLING_RATE, SMALLEST_RATE
from cloister.utils.errors import ConfigError
from cloister.utils.text import suggestion

SCATTERING = "scattering"
"""Value of `task.features` for the extractor that is built in."""
FEATURES = re.compile(r"(?P<file>[^\x00-\x1f]+\.(?:keras|safetensors))@(?P<digest>[0-9a-f]{64})")
"""Pattern of `task.features` for a file."""
HELD_BACK = 0.2
"""Share of its examples that a client holds back by default where clients score models on their own."""


class TaskConfig(Section):
    """Section `task.*`: the learning problem and the partition of its examples among simulated clients."""

    name: str = "digits"
    model: str = "auto"
    data_path: str = ""
    partition: Literal["auto", "iid", "shards", "dirichlet", "natural", "table", "table-2", "table-3", "table-9"] = (
        "auto"
    )
    alpha: Positive = 0.5
    shards_per_client: Count = 2
    table: str = ""
    examples_per_client: Whole = 0
    rotated_fraction: Fraction = 0.0
    test_fraction: Share | Auto = "auto"
    group: Heading = ""
    image_size: Annotated[int, Field(ge=1, le=256)] | Auto = "auto"
    skip_damaged: bool = False
    statistics: Literal["average", "local"] = "average"
    features: str = ""

    @property
    def held_back(self) -> float:
        """Return the share of its examples that a client does not train on.

        Raises:
            ConfigError: it is `auto`, which `RunConfig.for_clients` makes a number.
        """
        if self.test_fraction == "auto":
            raise ConfigError("task.test-fraction = 'auto' is a number only beside the other settings of a run")
        return self.test_fraction

    @field_validator("features")
    @classmethod
    def _names_an_extractor(cls, text: str) -> str:
        if text and text != SCATTERING and not FEATURES.fullmatch(text):
            raise ValueError(
                f"task.features = {text!r} is not valid: it must be {SCATTERING!r}, or FILE.keras@SHA256 or "
                "FILE.safetensors@SHA256 with the 64 digits that sha256sum prints"
            )
        return text

    @model_validator(mode="after")
    def _agree(self) -> "TaskConfig":
        """Refuse a setting of a partition other than the chosen one."""
        for name, partition in (("alpha", "dirichlet"), ("shards_per_client", "shards"), ("table", "table")):
            if self.partition != partition and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"task.{kebab(name)} = {getattr(self, name)!r} has no effect with task.partition = "
                    f"{self.partition!r}; it belongs to {partition!r}"
                )
        if self.examples_per_client and self.partition not in ("auto", "iid", "shards"):
            raise ValueError(
                f"task.examples-per-client = {self.examples_per_client} has no effect with task.partition = "
                f"{self.partition!r}; it belongs to 'iid' and 'shards'"
            )
        return self


_OPTION = re.compile(r"strategy\.[A-Za-z0-9-]+")
"""Pattern of a strategy's option. Only the strategy can validate its name."""


class StrategyConfig(Section):
    """Section `strategy.*`: aggregation and sampling. Other keys are options of the named strategy."""

    name: str = "fedavg"
    fraction_train: Annotated[float, Field(gt=0, le=1)] = 1.0
    fraction_evaluate: Fraction = 1.0
    min_nodes: Count = 2
    quorum: Count | Auto = "auto"
    min_replies: Whole = 0
    pretrain_epochs: Whole = 0
    sampling: Literal["fixed", "poisson"] = "fixed"
    weighting: Literal["auto", "examples", "uniform"] = "auto"
    options: dict[str, Scalar] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, values: Mapping[str, object]) -> dict[str, object]:
        """Move the strategy's own keys into `options`, except those with the value `auto`."""
        known = {name for field in cls.model_fields for name in (field, kebab(field))}
        own = {key: value for key, value in values.items() if key not in known and value != "auto"}
        carried = values.get("options", "")
        if isinstance(carried, Mapping):
            options = dict(carried)
        elif isinstance(carried, str):
            options = {kebab(key): value for key, value in read_options("strategy.options", carried).items()}
            for key, value in options.items():
                if key in known or not _OPTION.fullmatch(f"strategy.{key}"):
                    raise ValueError(f"strategy.options: {key} = {value!r} is no option of a strategy")
                if key in own:
                    raise ValueError(
                        f"strategy.options: {key} = {value!r} contradicts strategy.{key} = {own[key]!r}; keep one"
                    )
        else:
            raise ValueError(f"strategy.options = {carried!r} is not valid: it must be a valid string")
        return {key: value for key, value in values.items() if key in known} | {"options": options | own}

    @field_validator("options")
    @classmethod
    def _given(cls, options: dict[str, Scalar]) -> dict[str, Scalar]:
        return {key: value for key, value in options.items() if value != "auto"}

    @model_serializer
    def _flat(self) -> dict[str, Scalar]:
        """Return options as separate keys, in whichever form they were set."""
        return self.leaves() | {"options": ""} | self.options


def listed(text: str) -> tuple[str, ...]:
    """Split a text at its commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def optimizer_options(text: str) -> dict[str, Scalar]:
    """Return the options of an optimizer by the names of Keras' arguments.

    Args:
        text: `key=value` pairs with blanks between them, or a TOML document.

    Raises:
        ValueError: it is neither.
    """
    return {key.replace("-", "_"): value for key, value in read_options("client.optimizer-options", text).items()}


class ClientConfig(Section):
    """Section `client.*`: local training. `auto` takes the value of the task's recipe, and an empty text none."""

    local_epochs: Count | Auto = "auto"
    batch_size: Count | Auto = "auto"
    learning_rate: Positive | Auto = "auto"
    optimizer: str = "auto"
    schedule: Literal["auto", "constant", "linear", "cosine"] = "auto"
    warmup_rounds: Whole | Auto = "auto"
    final_rate_share: Fraction | Auto = "auto"
    class_weights: str = "auto"
    loss_scale: Positive | Auto = "auto"
    augmentation: str = "auto"
    callbacks: bool = True
    optimizer_options: str = "auto"
    recipe_keys: ClassVar[tuple[str, ...]] = (
        *("local_epochs", "batch_size", "learning_rate", "optimizer", "schedule", "warmup_rounds", "final_rate_share"),
        *("class_weights", "loss_scale", "augmentation", "optimizer_options"),
    )
    """Keys that override the task's recipe."""

    @field_validator("class_weights")
    @classmethod
    def _are_weights(cls, text: str) -> str:
        """Refuse values other than `auto` and lists of numbers above 0."""
        for part in () if text == "auto" else listed(text):
            try:
                number = float(part)
            except ValueError:
                number = math.nan
            if not 0 < number < math.inf:
                raise ValueError(
                    f"client.class-weights = {text!r} is not valid: {part!r} must be a finite number above 0"
                )
        return text

    @field_validator("optimizer_options")
    @classmethod
    def _are_options(cls, text: str) -> str:
        """Refuse values other than `auto` and options that are finite numbers, true or false."""
        for key, value in optimizer_options(text).items() if text != "auto" else ():
            if isinstance(value, str) or not math.isfinite(value):
                raise ValueError(
                    f"client.optimizer-options: {key} = {value!r} is not valid: it must be a number or a bool"
                )
        return text

    @model_validator(mode="after")
    def _agree(self) -> "ClientConfig":
        if self.schedule == "constant" and self.final_rate_share != "auto":
            raise ValueError(
                f"client.final-rate-share = {self.final_rate_share} has no effect with client.schedule = 'constant'; "
                "it belongs to 'linear' and 'cosine'"
            )
        return self


class EvaluationConfig(Section):
    """Section `evaluation.*`: evaluation of the global model, and early stopping.

    With `federated = "auto"`, clients evaluate if no mechanism is on, or if some are held out for it. With
    `central = "auto"`, the server evaluates if the task's examples are available there.
    """

    central: bool | Auto = "auto"
    federated: Literal["auto", "on", "off"] = "auto"
    held_out_clients: Share = 0.0
    every: Count = 1
    patience: Whole = 0
    criterion: Annotated[str, Field(min_length=1)] = "loss"


class RunConfig(Section):
    """Complete configuration of one run: the top-level keys and the sections."""

    num_rounds: Count = 10
    seed: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    output_dir: Annotated[str, Field(min_length=1)] = "runs"
    run_name: str = ""
    resume: str = ""
    round_timeout: Positive = 600.0
    late_timeout: Positive = 60.0
    node_timeout: Positive = 120.0
    keep_checkpoints: Whole = 3
    tensorboard: bool = True
    report: bool = True
    tracking: Literal["none", "mlflow"] = "none"
    tracking_uri: str = ""
    log_format: Literal["text", "json"] = "text"
    task: TaskConfig = Field(default_factory=TaskConfig)
    strategy: StrategyConfig = Field(default_factory=StrategyConfig)
    client: ClientConfig = Field(default_factory=ClientConfig)
    privacy: PrivacyConfig = Field(default_factory=PrivacyConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    secure_aggregation: SecureAggregationConfig = Field(default_factory=SecureAggregationConfig)

    @property
    def is_private(self) -> bool:
        """Return whether any mechanism is on.

        If so, clients send counts and metrics only on request.
        """
        return self.privacy.server.is_on or self.privacy.client.is_on

    @property
    def shared_release(self) -> SharedRelease | None:
        """Return the release of a round with secure aggregation; None without it.

        Raises:
            ConfigError: the noise is not calibrated yet.
        """
        return self.secure_aggregation.shared_release(self.privacy, self.task.group)

    @property
    def sums_gradients(self) -> bool:
        """Return whether a client sums clipped gradients for one secure sum, and trains no model."""
        return self.secure_aggregation.enabled and self.privacy.client.clips_gradients

    @property
    def weights_by_examples(self) -> bool:
        """Return whether replies are weighted by their example counts."""
        if self.strategy.weighting == "auto":
            return not self.is_private
        return self.strategy.weighting == "examples"

    @property
    def scores_centrally(self) -> bool | Auto:
        """Return `evaluation.central`, or False if statistics stay at the sites: the server could score with none."""
        return self.task.statistics != "local" and self.evaluation.central

    @property
    def evaluates_on_clients(self) -> bool:
        """Return whether clients score the global model on their own held-out examples."""
        if self.strategy.fraction_evaluate == 0:
            return False
        if self.evaluation.held_out_clients:
            return self.evaluation.federated != "off"
        if self.task.test_fraction == 0:
            return False
        return self.evaluation.federated == "on" or (self.evaluation.federated == "auto" and not self.is_private)

    @property
    def for_clients(self) -> "RunConfig":
        """Return the configuration with a number for `task.test-fraction`: by default 0 where no example is scored.

        Held-out clients score all of their examples, or choose among hypotheses on the others. Clients, and every count
        of their examples, use it.
        """
        if self.task.test_fraction != "auto":
            return self
        chooses, held_out = self.privacy.server.hypotheses > 1, self.evaluation.held_out_clients
        scored = self.evaluates_on_clients and (chooses or not held_out)
        task = self.task.model_copy(update={"test_fraction": HELD_BACK if scored else 0.0})
        return self.model_copy(update={"task": task})

    @model_validator(mode="after")
    def _agree(self) -> "RunConfig":
        if message := next(filter(None, (rule(self) for rule in RULES)), ""):
            raise ValueError(message)
        return self

    def flat(self) -> dict[str, Scalar]:
        """Return the configuration as flat dotted keys."""
        return flatten(self.model_dump(by_alias=True))

    def digest(self) -> str:
        """Return the SHA-256 of the settings without confidential values: see `digest_of`."""
        return digest_of(self.flat())


Rule = Callable[[RunConfig], str]
RULES: list[Rule] = []
"""Rules between sections: each returns the message of a contradiction, or an empty string."""


def _rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


@_rule
def _server_has_statistics(config: RunConfig) -> str:
    if config.evaluation.central is not True or config.task.statistics != "local":
        return ""
    return (
        "evaluation.central = True contradicts task.statistics = 'local': the server's model has the statistics of "
        "no site, and would be scored untrained; use 'auto', with which sites alone score, or 'average'"
    )


@_rule
def _evaluation_has_clients(config: RunConfig) -> str:
    evaluation, fraction = config.evaluation, config.strategy.fraction_evaluate
    if config.evaluates_on_clients:
        return ""
    if evaluation.held_out_clients:
        return (
            f"evaluation.held-out-clients = {evaluation.held_out_clients} has no effect with evaluation.federated = "
            f"{evaluation.federated!r} and strategy.fraction-evaluate = {fraction}: the server would not ask them"
        )
    if evaluation.patience and not config.scores_centrally:
        central = "" if config.task.statistics == "local" else "evaluation.central, "
        return (
            f"evaluation.patience = {evaluation.patience} needs scores: {central}evaluation.federated or "
            "evaluation.held-out-clients"
        )
    if evaluation.federated == "on":
        return (
            f"evaluation.federated = 'on' needs task.test-fraction = {config.task.test_fraction} and "
            f"strategy.fraction-evaluate = {fraction} above 0"
        )
    return ""


@_rule
def _scores_cost_no_budget(config: RunConfig) -> str:
    limit, evaluation = config.privacy.client.max_epsilon, config.evaluation
    if not limit or not config.evaluates_on_clients:
        return ""
    asks, instead = f"federated = {evaluation.federated!r}", "federated = 'off'"
    if evaluation.held_out_clients:
        asks, instead = f"held-out-clients = {evaluation.held_out_clients}", "held-out-clients = 0.0"
    return (
        f"privacy.client-max-epsilon = {limit:g} contradicts evaluation.{asks}: scores leave clients without noise, "
        f"and no budget covers that; use evaluation.{instead}, with which no client scores, or no budget (0)"
    )


@_rule
def _criterion_stops(config: RunConfig) -> str:
    found = config.evaluation
    if found.patience or found.criterion == "loss":
        return ""
    return (
        f"evaluation.criterion = {found.criterion!r} has no effect with evaluation.patience = 0, with which no run "
        "stops early"
    )


@_rule
def _weights_are_bounded(config: RunConfig) -> str:
    server, weighting = config.privacy.server, config.strategy.weighting
    if config.is_private and weighting == "examples" and not server.examples_cap:
        return (
            f"strategy.weighting = 'examples' contradicts privacy.server = {server.name!r} and privacy.client = "
            f"{config.privacy.client.name!r}: one client's weight would be unbounded, and its count would leave; with "
            "noise on the server cap it with privacy.examples-cap, or use 'uniform'"
        )
    if server.examples_cap and weighting != "examples":
        return (
            f"privacy.examples-cap = {server.examples_cap} has no effect with strategy.weighting = {weighting!r}; use "
            "'examples', or remove it"
        )
    return ""


@_rule
def _groups_are_clipped(config: RunConfig) -> str:
    client, group = config.privacy.client, config.task.group
    if group and not client.clips_gradients:
        return (
            f"task.group = {group!r} has no effect with privacy.client = {client.name!r}: it is whose gradients "
            "'dp-sgd' clips together"
        )
    if client.clips_gradients and not group and config.privacy.dp_sgd.group_cap != DEFAULTS["group-cap"]:
        return (
            f"privacy.group-cap = {config.privacy.dp_sgd.group_cap} has no effect with task.group = ''; name the groups"
        )
    return ""


@_rule
def _population_is_drawn_from(config: RunConfig) -> str:
    population, held_out = config.privacy.server.population, config.evaluation.held_out_clients
    if population and held_out:
        return (
            f"privacy.population = {population} contradicts evaluation.held-out-clients = {held_out}: nodes that are "
            "never drawn are no population to draw from"
        )
    if population and config.strategy.sampling != "fixed":
        return (
            f"privacy.population = {population} has no effect with strategy.sampling = {config.strategy.sampling!r}; "
            "Poisson sampling needs no registered population"
        )
    return ""


@_rule
def _canaries_are_clients(config: RunConfig) -> str:
    canaries, client = config.privacy.server.canaries, config.privacy.client
    if not canaries or not client.is_on:
        return ""
    return (
        f"privacy.canaries = {canaries} contradicts privacy.client = {client.name!r}: canaries measure the server's "
        "noise, and would not carry that of the clients; use 'none'"
    )


@_rule
def _rounds_suffice(config: RunConfig) -> str:
    warmup, split_round = config.client.warmup_rounds, config.privacy.split_round
    if warmup != "auto" and warmup >= config.num_rounds:
        return f"client.warmup-rounds = {warmup} must be below num-rounds = {config.num_rounds}"
    if split_round and config.privacy.server.hypotheses == 1:
        return f"privacy.clusters-split-round = {split_round} has no effect with privacy.clusters = 1; use more"
    if split_round > config.num_rounds:
        return f"privacy.clusters-split-round = {split_round} must be at most num-rounds = {config.num_rounds}"
    return ""


@_rule
def _store_has_a_tracker(config: RunConfig) -> str:
    if not config.tracking_uri:
        return ""
    if config.tracking == "none":
        return f"tracking-uri = {config.tracking_uri!r} has no effect with tracking = 'none'; use 'mlflow'"
    if "@" in config.tracking_uri:  # not shown: it may be a password
        return "tracking-uri holds an '@': every node sees it, so name a store with a password by MLFLOW_TRACKING_URI"
    return ""


@_rule
def _sums_are_possible(config: RunConfig) -> str:
    """Return the first setting that contradicts secure aggregation."""
    if not config.secure_aggregation.enabled:
        rate = config.privacy.dp_sgd.sampling_rate if config.privacy.client.clips_gradients else 0.0
        return f"{SAMPLING_RATE} = {rate} has no effect with {ENABLED} = False; use client.batch-size" if rate else ""
    if config.privacy.client.clips_gradients:
        reason = _sum_of_steps(config) or _sum_of_clients(config)
    else:
        reason = _sum_of_server(config) or _sum_of_clients(config)
    return f"{ENABLED} = true contradicts {reason}" if reason else ""


def _sum_of_server(config: RunConfig) -> str:
    server = config.privacy.server
    if isinstance(server, variants.MetricPrivacy):
        if server.distance != "rms":
            return (
                f"privacy.distance = {server.distance!r}: the distance of two clients needs single updates, and the "
                "server sees none; use 'rms', which follows from sums, or privacy.server = 'global-dp'"
            )
        if server.distance_release != "private" or server.distance_clip != "after":
            return (
                f"privacy.distance-release = {server.distance_release!r} with privacy.distance-clip = "
                f"{server.distance_clip!r}: what the server learns beside the sum has noise of its own, and is of "
                "clipped updates; use 'private' and 'after'"
            )
        if isinstance(server.clipping, variants.AdaptiveClipping):
            return (
                "privacy.clipping = 'adaptive' with privacy.server = 'metric': a distance is of one clip; use 'fixed'"
            )
        if server.distance_noise_multiplier > LARGEST_MULTIPLIER:
            return (
                f"privacy.distance-noise-multiplier = {server.distance_noise_multiplier:g}: no shares of so much noise "
                f"are made; use at most {LARGEST_MULTIPLIER:g}"
            )
    elif not isinstance(server, variants.GlobalPrivacy):
        return (
            f"privacy.server = {server.name!r}: groups and choices need single updates, and the server sees none; use "
            "'global-dp', or 'metric' with privacy.distance = 'rms'"
        )
    if server.placement != "update":
        return f"privacy.placement = {server.placement!r}, which needs single updates; use 'update'"
    clipping = server.clipping
    if isinstance(clipping, variants.AdaptiveClipping) and clipping.count_noise_multiplier > LARGEST_MULTIPLIER:
        return (
            f"privacy.clipping-count-noise-multiplier = {clipping.count_noise_multiplier:g}: no shares of so much "
            f"noise are made; use at most {LARGEST_MULTIPLIER:g}"
        )
    if server.is_calibrated:
        return (
            "privacy.noise-multiplier = 'auto': clients add the noise, and go by the configuration; "
            "`cloister plan --epsilon` finds it"
        )
    if server.examples_cap or config.strategy.weighting == "examples":
        return (
            "strategy.weighting = 'examples': every update counts the same; use 'uniform' and no privacy.examples-cap"
        )
    return ""


def _sum_of_steps(config: RunConfig) -> str:
    """Return the first setting that contradicts steps of DP-SGD on a secure sum."""
    server, client, dp_sgd = config.privacy.server, config.client, config.privacy.dp_sgd
    if server.name != "none":
        return (
            f"privacy.server = {server.name!r} with privacy.client = 'dp-sgd': a step has the noise of its clients and "
            "no other; use 'none'"
        )
    if dp_sgd.sampling_rate < SMALLEST_RATE:
        return (
            f"{SAMPLING_RATE} = {dp_sgd.sampling_rate:g} with privacy.client = 'dp-sgd': all clients draw examples at "
            "one rate; set it to the expected batch of all clients over the number of all their examples"
        )
    if dp_sgd.batch_sampling != "poisson":
        return f"privacy.batch-sampling = {dp_sgd.batch_sampling!r}: a step draws each example by itself; use 'poisson'"
    for key, value, instead in (
        ("batch-size", client.batch_size, f"{SAMPLING_RATE} sets it"),
        ("local-epochs", client.local_epochs, "a round is one step, and num-rounds sets their number"),
        ("optimizer-options", client.optimizer_options, "the server's strategy takes the step"),
        ("optimizer", client.optimizer, "the server's strategy takes the step"),
    ):
        if value != "auto" and (key, value) != ("optimizer", "sgd"):
            return f"client.{key} = {value!r} with privacy.client = 'dp-sgd': {instead}; use 'auto'"
    return ""


def _sum_of_clients(config: RunConfig) -> str:
    server, strategy = config.privacy.server, config.strategy
    if config.privacy.client.is_on and not config.privacy.client.clips_gradients:
        return (
            f"privacy.client = {config.privacy.client.name!r}: clients add a share of the server's noise and no "
            "other; use 'none', or 'dp-sgd' with privacy.server = 'none'"
        )
    if config.privacy.noise_seed != -1:
        return (
            f"privacy.noise-seed = {config.privacy.noise_seed}: the noise of each client comes from its own secrets; "
            "use -1"
        )
    if strategy.sampling != "fixed" or server.population:
        return (
            f"strategy.sampling = {strategy.sampling!r} and privacy.population = {server.population}: members sign "
            "each other's names, so that no draw is secret; use 'fixed' and 0"
        )
    if server.canaries:
        return f"privacy.canaries = {server.canaries}: the server cannot put made-up clients into a sum; use 0"
    if strategy.min_replies:
        return f"strategy.min-replies = {strategy.min_replies}: {THRESHOLD} says how many a round needs; use 0"
    parties = config.secure_aggregation.parties
    if strategy.min_nodes not in parties.survivors():
        return (
            f"strategy.min-nodes = {strategy.min_nodes}: with {THRESHOLD} = {parties.threshold} and {COLLUDING} = "
            f"{parties.colluding} a round needs {parties.threshold} to {parties.members} clients"
        )
    return ""


NEAREST, NEAREST_KEYS = 3, "; the nearest valid keys are {}; docs/configuration.md has them all"
"""Largest number of keys that a message about an unknown one suggests, and its words if none is similar."""
_TABLE = "tool.flwr.app.config."
"""Prefix of the keys of a whole `pyproject.toml`."""


def parse(flat: Mapping[str, Scalar]) -> RunConfig:
    """Parse Flower's flat mapping into a `RunConfig`.

    Raises:
        ConfigError: naming each invalid key, the value found and the valid ones.

    Examples:
        >>> config = parse({"num-rounds": 3, "privacy.server": "global-dp", "privacy.noise-multiplier": 1.0})
        >>> config.num_rounds, config.privacy.server.noise_multiplier
        (3, 1.0)
        >>> parse({"num-round": 3})
        Traceback (most recent call last):
        cloister.utils.errors.ConfigError: unknown key 'num-round'; did you mean 'num-rounds'...
    """
    known = known_keys()
    unknown = [key for key in flat if key not in known and not _OPTION.fullmatch(key)]
    if not unknown:
        return checked(RunConfig, _nested(with_parties(flat)))
    if any(key.startswith(_TABLE) for key in unknown):
        raise ConfigError(
            f"unknown table [{_TABLE[:-1]}]: that of pyproject.toml; here keys stand outside of any table"
        )
    meant = [*known, *(kebab(key) for key in unknown if _OPTION.fullmatch(kebab(key)))]
    near = [suggestion(key, meant, NEAREST, NEAREST_KEYS) for key in unknown]
    lines = [
        refusal(key, flat) if key in RENAMED else f"unknown key {key!r}{found}"
        for key, found in zip(unknown, near, strict=True)
    ]
    # Rules between keys are skipped: a misspelt key may be the one that they need.
    try:
        checked(RunConfig, _nested({key: value for key, value in flat.items() if key not in unknown}))
    except ConfigError as error:
        lines += [line for line in str(error).splitlines() if INVALID in line]
    raise ConfigError("\n".join(lines))


def _nested(flat: Mapping[str, Scalar]) -> dict[str, object]:
    sections: dict[str, dict[str, Scalar]] = {}
    for key, value in flat.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    return {**sections.pop("", {}), **sections}


def known_keys() -> list[str]:
    """Return every key except the options of strategies, dotted and sorted."""
    return sorted(RunConfig().flat())


NOISE_SEED = "privacy.noise-seed"
NOT_SHOWN = {NOISE_SEED: "seeded", "tracking-uri": "given"}
"""Keys whose values only `config.json` contains, and the word shown in place of a value. With the noise seed, an
attacker can remove the noise. The tracking URI reveals where an operator stores records."""


def shown(settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings with a placeholder for each confidential value.

    Args:
        settings: dotted keys of a run.
    """
    defaults = RunConfig().flat()
    hidden = {key for key in NOT_SHOWN if settings.get(key, defaults[key]) != defaults[key]}
    return {key: NOT_SHOWN[key] if key in hidden else value for key, value in settings.items()}


def digest_of(settings: Mapping[str, Scalar]) -> str:
    """Return the SHA-256 of the settings with placeholders for confidential values.

    The values of `NOT_SHOWN` do not enter the digest. There are few noise seeds. An attacker with the digest and the
    other settings could find the seed by trying all of them.

    Args:
        settings: dotted keys of a run.
    """
    return hashlib.sha256(json.dumps(shown(settings), sort_keys=True).encode()).hexdigest()


def changed(settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the keys whose values differ from their defaults.

    Args:
        settings: dotted keys of a run.
    """
    defaults = RunConfig().flat()
    return {key: value for key, value in settings.items() if key not in defaults or value != defaults[key]}
