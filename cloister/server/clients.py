"""What the server has to say to and about its clients beside rounds: personal models, and mechanisms of theirs."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from cloister.core.arrays import Layout
from cloister.core.errors import ConfigError
from cloister.core.wire import ARRAYS, CONFIG, HYPOTHESES
from cloister.privacy.claims.local import gaussian_statement, laplace_statement, render_local
from cloister.server.build import Plan

PATIENCE_SECONDS = 60.0
"""How long the end of a run waits for nodes to save their personal models."""


def personalise(grid: Grid, arrays: ArrayRecord, public: Mapping[str, int], hypotheses: int) -> None:
    """Send the final hypotheses to every connected node, for it to keep the one that suits it; nothing comes back."""
    content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({**public, HYPOTHESES: hypotheses})})
    messages = [Message(content, node, MessageType.QUERY) for node in grid.get_node_ids()]
    for message in messages:
        message.metadata.ttl = PATIENCE_SECONDS
    list(grid.send_and_receive(messages, timeout=PATIENCE_SECONDS))


def client_statement(plan: Plan, layout: Layout, rounds: int) -> dict[str, Any] | None:
    """What may be said about the clients' own mechanism; None without one.

    Args:
        plan: of the run.
        layout: of everything that the server sends, all hypotheses.
        rounds: in which clients were asked to train.

    Raises:
        ConfigError: nothing is known about this mechanism.
    """
    mechanism = plan.config.privacy.client.name
    if mechanism == "none":
        return None
    if mechanism not in STATEMENTS:
        raise ConfigError(f"privacy.client = {mechanism!r} has no statement; known: {', '.join(STATEMENTS)}")
    facts = STATEMENTS[mechanism](plan, layout, rounds)
    return _reserved(facts, list(_beside_the_noise(plan)))


def _laplace_statement(plan: Plan, layout: Layout, rounds: int) -> dict[str, Any]:
    """A client noises the one hypothesis that it sends: p is the size of that."""
    return laplace_statement(plan.config.privacy, layout.size // max(1, plan.hypotheses), rounds, plan.hypotheses)


def _gaussian_statement(plan: Plan, _: Layout, rounds: int) -> dict[str, Any]:
    return gaussian_statement(plan.config.privacy, rounds, plan.hypotheses)


def _beside_the_noise(plan: Plan) -> Iterator[str]:
    """What clients let leave in this run that their own noise does not cover."""
    if plan.config.evaluates_on_clients and not plan.config.evaluation.held_out_clients:
        yield "scores of models on the clients' own examples leave without noise"
    if plan.held_out is not None and plan.held_out.newcomers:
        yield (
            "nodes were connected after roles had been dealt out: one that has no lasting memory of its data may have "
            "come back under a new id, and both trained and sent scores without noise"
        )


def _reserved(facts: dict[str, Any], reasons: list[str]) -> dict[str, Any]:
    """The statement without its claims, if there are reasons against them."""
    if not reasons:
        return facts
    facts |= {"status": "heuristic", "reasons": [*facts["reasons"], *reasons]}
    for part in (facts, *facts.get("by-examples", ())):
        if "claims" in part:
            part["claims"] = []
    return facts


def _dp_sgd_statement(plan: Plan, _: Layout, rounds: int) -> dict[str, Any]:
    """For clients of several sizes: how many examples, or groups of them, a client has, the server does not know.

    Just above one batch an epoch has two steps that hardly sample. With little noise some sizes of two or three batches
    cost a tenth more than that; what a client has really spent, its own ledger knows.
    """
    from cloister.privacy.claims.end_to_end import dp_sgd_statement

    config, recipe = plan.config, plan.task.recipe.resolved(plan.config.client)
    unit: Literal["example", "group"] = "group" if config.task.group else "example"
    about = [
        dp_sgd_statement(
            config.privacy,
            examples=examples,
            batch_size=recipe.batch_size,
            epochs=recipe.local_epochs,
            rounds_taken_part=rounds,
            delta=config.privacy.target_delta,
            unit=unit,
            hypotheses=plan.hypotheses,
        )
        for examples in (recipe.batch_size, recipe.batch_size + 1, 10 * recipe.batch_size, 100 * recipe.batch_size)
    ]
    common = {name: about[0][name] for name in ("mechanism", "status", "reasons", "parameters", "noise")}
    sizes = [{name: each[name] for name in (f"{unit}s", "rounds", "claims", "heuristic")} for each in about]
    return {**common, "see": "each client's own ledger: sizes in between may cost more", "by-examples": sizes}


def render_clients(privacy: Mapping[str, Any]) -> list[str]:
    """That statement as lines of plain text."""
    facts = privacy.get("clients")
    return [] if facts is None else WORDS[facts["mechanism"]](facts)


def _render_dp_sgd(facts: Mapping[str, Any]) -> list[str]:
    lines = [f"clients: dp-sgd, {facts['status']}; what each has spent stands in its own ledger"]
    lines += [f"  not a guarantee: {reason}" for reason in facts["reasons"]]
    for size in facts["by-examples"]:
        lines += [
            f"  ε = {claim['epsilon']:.4g} at δ = {claim['delta']:g} for one {claim['unit']} of a client with "
            f"{size[claim['unit'] + 's']} {claim['unit']}s that trained in {size['rounds']} rounds: "
            f"against {claim['adversary']}"
            for claim in size["claims"]
            if claim["unit"] != "client"
        ]
    return lines


STATEMENTS: Mapping[str, Callable[[Plan, Layout, int], dict[str, Any]]] = {
    "dp-sgd": _dp_sgd_statement,
    "gaussian": _gaussian_statement,
    "laplace": _laplace_statement,
}
"""By `privacy.client`: what may be said after so many rounds."""
WORDS: Mapping[str, Callable[[dict[str, Any]], list[str]]] = {
    "dp-sgd": _render_dp_sgd,
    "gaussian": render_local,
    "laplace": render_local,
}
"""By `privacy.client`: the same in lines of plain text."""
