"""What the server has to say to and about its clients beside rounds: personal models, and mechanisms of theirs."""

from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from cloister.core.arrays import Layout
from cloister.core.wire import ARRAYS, CONFIG, HYPOTHESES
from cloister.privacy.leakage import laplace_in_words, laplace_statement
from cloister.server.build import Plan

BATCHES = (1, 10, 100)
"""Sizes of the clients that a claim about DP-SGD is made for, in batches."""
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
    """What may be said about the clients' own mechanism; None without one."""
    privacy = plan.config.privacy
    if privacy.client == "laplace":
        return laplace_statement(privacy, layout.size // max(1, plan.hypotheses), rounds)
    return _dp_sgd_statement(plan, rounds) if privacy.client == "dp-sgd" else None


def _dp_sgd_statement(plan: Plan, rounds: int) -> dict[str, Any]:
    """For clients of several sizes: how many examples a client has, the server does not know."""
    from cloister.privacy.end_to_end import dp_sgd_statement

    config, recipe = plan.config, plan.task.recipe
    batch_size = recipe.batch_size if config.client.batch_size == "auto" else config.client.batch_size
    epochs = recipe.local_epochs if config.client.local_epochs == "auto" else config.client.local_epochs
    about = [
        dp_sgd_statement(
            config.privacy,
            examples=batches * batch_size,
            batch_size=batch_size,
            epochs=epochs,
            rounds_taken_part=rounds,
            delta=config.privacy.target_delta,
        )
        for batches in BATCHES
    ]
    common = {name: about[0][name] for name in ("mechanism", "status", "reasons", "parameters", "noise")}
    sizes = [{name: each[name] for name in ("examples", "rounds", "claims", "heuristic")} for each in about]
    return {**common, "see": "each client's own ledger", "by-examples": sizes}


def clients_in_words(privacy: Mapping[str, Any]) -> list[str]:
    """That statement as lines of plain text."""
    facts = privacy.get("clients")
    if facts is None:
        return []
    return laplace_in_words(facts) if facts["mechanism"] == "laplace" else _dp_sgd_in_words(facts)


def _dp_sgd_in_words(facts: Mapping[str, Any]) -> list[str]:
    lines = [f"clients: dp-sgd, {facts['status']}; what each has spent stands in its own ledger"]
    lines += [f"  not a guarantee: {reason}" for reason in facts["reasons"]]
    for size in facts["by-examples"]:
        lines += [
            f"  ε = {claim['epsilon']:.4g} at δ = {claim['delta']:g} for one {claim['unit']} of a client with "
            f"{size['examples']} examples that trained in {size['rounds']} rounds: against {claim['adversary']}"
            for claim in size["claims"]
            if claim["unit"] == "example"
        ]
    return lines
