"""Attestation of a reply: the releases that its client made, their unit, the code's origin, and the ledger's head.

The ledger is stated by the hash of its last line about a release. With it the site's officer finds the server's record
of this run in the site's ledger, and detects a change to any earlier line.

Adversary: the server, which gets these hashes and knows its own requests. The lines of a ledger tell of other runs, of
budgets and of where data lies, and most of that can be guessed. But each stated line has the id of its release, 122
random bits that never leave the site. So a guess of a line cannot be compared with a hash, nor with two of them.
"""

import os
from dataclasses import replace

from cloister.client.charges import PROMISED, charges_of, plan_of
from cloister.client.ledgers import folder_unnamed, keeps_ledger, ledger_of
from cloister.client.mods.enforce import Handler
from cloister.client.node import Node
from cloister.client.policy import CHECKED_BUNDLE
from cloister.client.request import Reply, Request, TrainRequest
from cloister.privacy.claims.attestation import Attestation


def attest(request: Request, node: Node, call_next: Handler) -> Reply:
    """State with a trained model what the client's own mechanism released; pass on every other reply as it is.

    The statement follows from the request, the policy and the configuration of the node. It depends on no example.
    """
    reply = call_next(request, node)
    if not isinstance(request, TrainRequest) or not request.config.privacy.client.is_on:
        return reply
    return replace(reply, attestation=_attestation(request, node), ledger_head=_ledger_head(request, node))


def _ledger_head(request: TrainRequest, node: Node) -> str:
    """Return the hash that names the state of the node's ledger; empty: it keeps none."""
    if not keeps_ledger(node.config):
        return ""
    with folder_unnamed(node.config):
        return ledger_of(node.config, request.config.task.name).release_head


def _attestation(request: TrainRequest, node: Node) -> Attestation:
    client = request.config.privacy.client
    own = next(charge for charge in charges_of(request, node) if charge.mechanism != PROMISED)
    size = plan_of(request, node).public_size if client.clips_gradients else 0
    allowed = node.policy.allowed_fabs if node.policy else ()
    checked = os.environ.get(CHECKED_BUNDLE) in allowed
    return Attestation(client.name, own.unit, own.events, size, request.config.task.group, checked)
