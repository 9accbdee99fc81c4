"""Description of a policy in words: its requirements, and the information that it still reveals."""

from cloister.client.policy import Policy
from cloister.core.digits import at_least, at_most


def render(policy: Policy) -> list[str]:
    """Return the rules of a policy, a line each; `!` begins a remaining risk."""
    lines = [f"tasks: {', '.join(policy.tasks)}", *_noise(policy)]
    if policy.peers:
        lines.append(f"in secure aggregations {len(policy.peers)} fingerprints of members are pinned")
    if policy.demands_secure_aggregation:
        lines.append("secure aggregation: the server must see a sum of several clients' updates only")
        if not policy.min_threshold:
            lines.append("! a sum may be of as few clients as the run says: set min-threshold")
        if not policy.min_colluding:
            lines.append("! a run need not hold against a server that has a client on its side: set min-colluding")
        if not policy.peers:
            lines.append("! whoever signs the roster can invent clients, and so see what this site sends: pin peers")
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


def _noise(policy: Policy) -> list[str]:
    if not policy.mechanisms:
        seen = "" if policy.demands_secure_aggregation else ": the server sees its models"
        return [f"! this site takes part in runs without noise{seen}"]
    minima = {
        "laplace": policy.min_laplace_noise_multiplier,
        **dict.fromkeys(policy.believed, policy.min_server_noise_multiplier),
    }
    named = [(name, minima.get(name, policy.min_client_noise_multiplier)) for name in policy.mechanisms]
    words = [
        f"{name} with at least {at_least(minimum, 6)}" if minimum else f"{name} with any noise"
        for name, minimum in named
    ]
    whose = "other clients add" if policy.demands_secure_aggregation else "server adds"
    believed = [f"! this site cannot check the noise that the {whose}"] if policy.believed else []
    return ["noise: " + ", or ".join(words), *believed]


def _budgets(policy: Policy) -> list[str]:
    unit, at = (
        ("group" if policy.group else "example"),
        f"at δ = {at_most(policy.target_delta)} over all runs on this data",
    )
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
    "what this node clips to (privacy.client-clipping-norm, privacy.clipping-norm of a sum)": (
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
