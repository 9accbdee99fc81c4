"""The run configuration: dotted keys, parsed once into frozen, typed sections.

Flower hands over one flat mapping of scalars (`[tool.flwr.app.config]` and the overrides of `flwr run`). Everything
after `parse` works with `RunConfig`. A value that is not given is `"auto"` where the task or the strategy decides.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cloister.core.errors import ConfigError

Scalar = str | int | float | bool
Auto = Literal["auto"]
Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class Section(BaseModel):
    """A frozen group of keys that refuses what it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=_kebab, populate_by_name=True, allow_inf_nan=False
    )


class TaskConfig(Section):
    """`task.*`: the learning problem and how its examples are dealt out to simulated clients."""

    name: str = "digits"
    model: str = "auto"
    data_path: str = ""
    partition: Literal["auto", "iid", "shards", "dirichlet", "natural", "table"] = "auto"
    alpha: Positive = 0.5
    shards_per_client: Count = 2
    table: str = ""
    examples_per_client: Annotated[int, Field(ge=0)] = 0
    rotated_fraction: Fraction = 0.0
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    group: Annotated[str, Field(pattern=r"^\w*$")] = ""

    @model_validator(mode="after")
    def _agree(self) -> "TaskConfig":
        """Refuse a partition's setting where another partition is asked for."""
        for name, partition in (("alpha", "dirichlet"), ("shards_per_client", "shards"), ("table", "table")):
            if self.partition != partition and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"task.{_kebab(name)} = {getattr(self, name)!r} has no effect with task.partition = "
                    f"{self.partition!r}; it belongs to {partition!r}"
                )
        if self.examples_per_client and self.partition not in ("auto", "iid", "shards"):
            raise ValueError(
                f"task.examples-per-client = {self.examples_per_client} has no effect with task.partition = "
                f"{self.partition!r}; it belongs to 'iid' and 'shards'"
            )
        return self


class StrategyConfig(Section):
    """`strategy.*`: aggregation and sampling; keys not named here are options of the named strategy."""

    name: str = "fedavg"
    fraction_train: Annotated[float, Field(gt=0, le=1)] = 1.0
    fraction_evaluate: Fraction = 1.0
    min_nodes: Count = 2
    quorum: Count | Auto = "auto"
    min_replies: Annotated[int, Field(ge=0)] = 0
    sampling: Literal["fixed", "poisson"] = "fixed"
    weighting: Literal["auto", "examples", "uniform"] = "auto"
    options: dict[str, Scalar] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, values: Any) -> Any:
        """Move what only the strategy itself can judge into `options`; `auto` means: not given."""
        if not isinstance(values, Mapping) or isinstance(values.get("options"), Mapping):
            return values
        known = {name for field in set(cls.model_fields) - {"options"} for name in (field, _kebab(field))}
        options = {key: value for key, value in values.items() if key not in known and value != "auto"}
        return {key: value for key, value in values.items() if key in known} | {"options": options}


class ClientConfig(Section):
    """`client.*`: local training; `auto` takes the task's recipe."""

    local_epochs: Count | Auto = "auto"
    batch_size: Count | Auto = "auto"
    learning_rate: Positive | Auto = "auto"
    optimizer: str = "auto"


class PrivacyConfig(Section):
    """`privacy.*`: what is done to what leaves, on the server and on the clients."""

    server: Literal["none", "global-dp", "metric", "laplace-clustering"] = "metric"
    noise_multiplier: NonNegative | Auto = 0.05
    clipping_norm: Positive = 2.0
    clipping: Literal["fixed", "adaptive"] = "fixed"
    clipping_quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    clipping_rate: Positive = 0.2
    bits_noise_multiplier: Positive = 10.0
    examples_cap: NonNegative = 0.0
    placement: Literal["update", "rule", "model"] = "update"
    distance: str = "mean-layer-frobenius"
    distance_release: Literal["exact", "private"] = "exact"
    distance_noise_multiplier: Positive = 1.0
    distance_direction: Literal["divide", "multiply"] = "divide"
    distance_clip: Literal["after", "before"] = "after"
    min_distance: Positive = 0.1
    max_distance: NonNegative = 0.0
    noise_seed: Annotated[int, Field(ge=-1)] = -1
    target_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    max_epsilon: NonNegative = 0.0
    population: Annotated[int, Field(ge=0)] = 0
    ledger_dir: str = ""
    data_identity: Annotated[str, Field(pattern=r"^[\w.-]*$")] = ""
    clusters: Annotated[int, Field(ge=1, le=100)] = 2
    client: Literal["none", "dp-sgd", "gaussian", "laplace"] = "none"
    client_noise_multiplier: NonNegative = 1.0
    client_clipping_norm: Positive = 1.0
    clipping_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    least_clipping_norm: NonNegative = 0.0
    batch_sampling: Literal["poisson", "shuffle"] = "poisson"
    client_max_epsilon: NonNegative = 0.0
    radius: NonNegative = 0.0
    per_layer: bool = False
    max_leakage: NonNegative = 0.0
    choice: Literal["private", "exact"] = "private"
    choice_epsilon: Positive = 1.0
    max_loss: Positive = 10.0
    group_cap: Count = 10

    @model_validator(mode="after")
    def _agree(self) -> "PrivacyConfig":
        """Refuse a setting that would silently do nothing, and settings that contradict each other."""
        defaults = PrivacyConfig.model_construct()
        lines = [
            f"privacy.{_kebab(name)} = {getattr(self, name)!r} has no effect with privacy.{_kebab(key)} = "
            f"{getattr(self, key)!r}; remove it or choose another privacy.{_kebab(key)}"
            for name, key in self._idle()
            if getattr(self, name) != getattr(defaults, name)
        ]
        if lines:
            raise ValueError("\n".join(lines))
        if self.clipping_decay and not self.least_clipping_norm:
            raise ValueError(
                f"privacy.clipping-decay = {self.clipping_decay} needs privacy.least-clipping-norm above 0: the clip "
                "would shrink until single precision knows it no more"
            )
        if self.noise_multiplier == "auto" and not self.max_epsilon:
            raise ValueError("privacy.noise-multiplier = 'auto' is calibrated to privacy.max-epsilon = 0; set a budget")
        if self.max_distance and self.max_distance < self.min_distance:
            raise ValueError(
                f"privacy.max-distance = {self.max_distance} must be at least privacy.min-distance = "
                f"{self.min_distance}, or 0 for no limit"
            )
        return self

    @property
    def has_server_noise(self) -> bool:
        """Whether the server clips and noises updates."""
        return self.server in ("global-dp", "metric")

    def _idle(self) -> list[tuple[str, str]]:
        """Keys that have no effect here, each with the key whose value makes it so."""
        idle = [(name, "server") for name in _METRIC_ONLY if self.server != "metric"]
        if self.server == "metric":
            # Two releases of one draw, the second of which depends on the first: nothing is amplified.
            idle.append(("population", "server"))
        idle += [(name, "clipping") for name in _ADAPTIVE_ONLY if self.clipping != "adaptive"]
        if not self.has_server_noise:
            idle += [(name, "server") for name in (*_SERVER_NOISE_ONLY, *_ADAPTIVE_ONLY)]
        if self.server == "metric" and self.distance_release == "exact":
            idle.append(("distance_noise_multiplier", "distance_release"))
        if self.server != "laplace-clustering":
            idle.append(("clusters", "server"))
        if not self.has_server_noise and self.client == "none":
            idle.append(("noise_seed", "server"))
        if not self.has_server_noise and self.client not in ("dp-sgd", "gaussian"):
            idle.append(("target_delta", "server"))
        idle += [(name, "client") for name in _DP_SGD_ONLY if self.client != "dp-sgd"]
        idle += [(name, "client") for name in _CLIPPED_ONLY if self.client not in ("dp-sgd", "gaussian")]
        if self.client == "none":
            idle += [(name, "client") for name in _CHOICE_ONLY]
        elif self.server != "laplace-clustering":
            idle += [(name, "server") for name in _CHOICE_ONLY]
        elif self.choice == "exact":
            idle += [(name, "choice") for name in _CHOICE_ONLY if name != "choice"]
        idle += [(name, "client") for name in _LAPLACE_ONLY if self.client != "laplace"]
        if self.client == "none":
            idle.append(("client_noise_multiplier", "client"))
        return list(dict(idle).items())


_SERVER_NOISE_ONLY = (
    "clipping",
    "clipping_norm",
    "examples_cap",
    "max_epsilon",
    "noise_multiplier",
    "placement",
    "population",
)
_DP_SGD_ONLY = ("batch_sampling", "clipping_decay", "group_cap", "least_clipping_norm")
_CLIPPED_ONLY = ("client_clipping_norm", "client_max_epsilon")
_CHOICE_ONLY = ("choice", "choice_epsilon", "max_loss")
_LAPLACE_ONLY = ("max_leakage", "per_layer", "radius")
_METRIC_ONLY = (
    "distance",
    "distance_clip",
    "distance_direction",
    "distance_noise_multiplier",
    "distance_release",
    "max_distance",
    "min_distance",
)
_ADAPTIVE_ONLY = ("bits_noise_multiplier", "clipping_quantile", "clipping_rate")


class EvaluationConfig(Section):
    """`evaluation.*`: who scores the global model, and when that ends a run.

    `federated = "auto"` asks the clients only when no privacy is on, or when some are held out for it.
    `central = "auto"` scores on the server where the task's examples are there.
    """

    central: bool | Auto = "auto"
    federated: Literal["auto", "on", "off"] = "auto"
    held_out_clients: Annotated[float, Field(ge=0, lt=1)] = 0.0
    every: Count = 1
    patience: Annotated[int, Field(ge=0)] = 0


class RunConfig(Section):
    """One run, complete: the top-level keys and the sections."""

    num_rounds: Count = 10
    seed: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    output_dir: Annotated[str, Field(min_length=1)] = "runs"
    run_name: str = ""
    round_timeout: Positive = 600.0
    node_timeout: Positive = 120.0
    keep_checkpoints: Annotated[int, Field(ge=0)] = 3
    tensorboard: bool = True
    log_format: Literal["text", "json"] = "text"
    task: TaskConfig = Field(default_factory=TaskConfig)
    strategy: StrategyConfig = Field(default_factory=StrategyConfig)
    client: ClientConfig = Field(default_factory=ClientConfig)
    privacy: PrivacyConfig = Field(default_factory=PrivacyConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)

    @property
    def is_private(self) -> bool:
        """Whether any mechanism is on; then clients send no counts and no metrics unless asked to."""
        return self.privacy.server != "none" or self.privacy.client != "none"

    @property
    def weights_by_examples(self) -> bool:
        """Whether replies are weighted by their example counts."""
        if self.strategy.weighting == "auto":
            return not self.is_private
        return self.strategy.weighting == "examples"

    @property
    def evaluates_on_clients(self) -> bool:
        """Whether clients score the global model on their own held-out examples."""
        if self.strategy.fraction_evaluate == 0:
            return False
        if self.evaluation.held_out_clients:
            return self.evaluation.federated != "off"
        if self.task.test_fraction == 0:
            return False
        return self.evaluation.federated == "on" or (self.evaluation.federated == "auto" and not self.is_private)

    @model_validator(mode="after")
    def _agree(self) -> "RunConfig":
        if self.evaluation.held_out_clients and not self.evaluates_on_clients:
            raise ValueError(
                f"evaluation.held-out-clients = {self.evaluation.held_out_clients} has no effect with "
                f"evaluation.federated = {self.evaluation.federated!r} and strategy.fraction-evaluate = "
                f"{self.strategy.fraction_evaluate}; nobody would ask them"
            )
        if self.evaluation.patience and not (self.evaluates_on_clients or self.evaluation.central):
            raise ValueError(
                f"evaluation.patience = {self.evaluation.patience} needs scores: evaluation.central, "
                "evaluation.federated or evaluation.held-out-clients"
            )
        if self.evaluation.federated == "on" and not self.evaluates_on_clients:
            raise ValueError(
                f"evaluation.federated = 'on' needs task.test-fraction = {self.task.test_fraction} and "
                f"strategy.fraction-evaluate = {self.strategy.fraction_evaluate} above 0"
            )
        capped = self.privacy.examples_cap > 0
        if self.is_private and self.strategy.weighting == "examples" and not capped:
            raise ValueError(
                f"strategy.weighting = 'examples' contradicts privacy.server = {self.privacy.server!r} and "
                f"privacy.client = {self.privacy.client!r}: one client's weight would be unbounded, and its count "
                "would leave; with noise on the server cap it with privacy.examples-cap, or use 'uniform'"
            )
        if capped and self.strategy.weighting != "examples":
            raise ValueError(
                f"privacy.examples-cap = {self.privacy.examples_cap} has no effect with strategy.weighting = "
                f"{self.strategy.weighting!r}; use 'examples', or remove it"
            )
        if self.task.group and self.privacy.client != "dp-sgd":
            raise ValueError(
                f"task.group = {self.task.group!r} has no effect with privacy.client = {self.privacy.client!r}: it is "
                "whose gradients 'dp-sgd' clips together"
            )
        if self.privacy.group_cap != PrivacyConfig.model_fields["group_cap"].default and not self.task.group:
            raise ValueError(
                f"privacy.group-cap = {self.privacy.group_cap} has no effect with task.group = ''; name the groups"
            )
        if self.privacy.population and self.evaluation.held_out_clients:
            raise ValueError(
                f"privacy.population = {self.privacy.population} contradicts evaluation.held-out-clients = "
                f"{self.evaluation.held_out_clients}: nodes that are never drawn are no population to draw from"
            )
        if self.privacy.population and self.strategy.sampling != "fixed":
            raise ValueError(
                f"privacy.population = {self.privacy.population} has no effect with strategy.sampling = "
                f"{self.strategy.sampling!r}; Poisson sampling needs no registered population"
            )
        return self

    def flat(self) -> dict[str, Scalar]:
        """The configuration as the dotted keys it was read from."""
        return flatten(self.model_dump(by_alias=True))

    def digest(self) -> str:
        """SHA-256 of the canonical dotted keys: equal for equal configurations."""
        return hashlib.sha256(json.dumps(self.flat(), sort_keys=True).encode()).hexdigest()


SECTIONS = ("task", "strategy", "client", "privacy", "evaluation")


def parse(flat: Mapping[str, Scalar]) -> RunConfig:
    """Turn Flower's flat mapping into a `RunConfig`.

    Raises:
        ConfigError: naming each bad key, the value found and what is valid.
    """
    _refuse_unknown(flat)
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, name = key.partition(".")
        if name:
            nested.setdefault(section, {})[name] = value
        else:
            nested[key] = value
    try:
        return RunConfig.model_validate(nested)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error.errors()))) from None


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Dotted keys of a nested mapping; `strategy.options.x` is written `strategy.x`."""
    flat: dict[str, Scalar] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, prefix if key == "options" else f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def known_keys() -> list[str]:
    """Every key outside the options of strategies, dotted and sorted."""
    return sorted(RunConfig().flat())


def suggestion(key: str, valid: Collection[str]) -> str:
    """`; did you mean ...?` where a valid key looks like `key`."""
    close = difflib.get_close_matches(_kebab(key), valid, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


_OPTION = re.compile(r"strategy\.[A-Za-z0-9-]+")
"""Any option: which of them a strategy has, only the strategy knows."""


def _refuse_unknown(flat: Mapping[str, Scalar]) -> None:
    known = known_keys()
    unknown = [key for key in flat if key not in known and not _OPTION.fullmatch(key)]
    if unknown:
        meant = [*known, *(_kebab(key) for key in unknown if _OPTION.fullmatch(_kebab(key)))]
        raise ConfigError("\n".join(f"unknown key {key!r}; {_nearest(key, meant)}" for key in unknown))


NEAREST = 3
"""Valid keys that an unknown one is answered with."""


def _nearest(key: str, valid: Collection[str]) -> str:
    """The valid keys most like `key`: the one that is meant, if one is near enough, and a few beside it."""
    close = difflib.get_close_matches(_kebab(key), valid, n=NEAREST)
    if close:
        others = f" (or {' or '.join(map(repr, close[1:]))})" if close[1:] else ""
        return f"did you mean {close[0]!r}?{others}"
    nearest = difflib.get_close_matches(_kebab(key), valid, n=NEAREST, cutoff=0.0)
    return f"the nearest valid keys are {', '.join(map(repr, nearest))}; docs/configuration.md has them all"


def _explain(errors: Iterable[Any]) -> list[str]:
    """One line for each bad key: the dotted key, what was found, what is valid."""
    lines: dict[str, str] = {}
    for item in errors:
        if item["type"] == "value_error":
            lines[str(item["ctx"]["error"])] = str(item["ctx"]["error"])
            continue
        parts = [str(part) for part in item["loc"]]
        key = _kebab(".".join(parts[:2]) if parts[0] in SECTIONS else parts[0])
        valid = item["msg"].replace("Input should", "it must")
        # A key of several types (a number, or "auto") has one error for each of them.
        lines[key] = (
            f"{lines[key]} or {valid.removeprefix('it must be ')}"
            if key in lines
            else f"{key} = {item['input']!r} is not valid: {valid}"
        )
    return list(lines.values())
