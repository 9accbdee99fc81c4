"""What the server has to say to and about its clients beside rounds: personal models, and mechanisms of theirs."""

from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from cloister.core.arrays import Layout
from cloister.core.wire import ARRAYS, CONFIG, HYPOTHESES
from cloister.privacy.leakage import laplace_in_words, laplace_statement
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
    """What may be said about the clients' own mechanism; None without one."""
    if plan.config.privacy.client == "laplace":
        parameters = layout.size // max(1, plan.hypotheses)
        return laplace_statement(plan.config.privacy, parameters, rounds)
    return None


def clients_in_words(privacy: Mapping[str, Any]) -> list[str]:
    """That statement as lines of plain text."""
    facts = privacy.get("clients")
    return laplace_in_words(facts) if facts and facts["mechanism"] == "laplace" else []
