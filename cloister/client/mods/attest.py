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
from cloister.client.node import Node
from cloister.client.policy import CHECKED_BUNDLE
from cloister.client.request import Reply, Request, TrainRequest
from cloister.privacy.claims.attestation import Attestation


def attest(reply: Reply, request: Request, node: Node) -> Reply:
    """State with a trained model what the client's own mechanism released; return every other reply as it is.

    The statement follows from the request, the policy and the configuration of the node. It depends on no example.
    """
    client, head = request.config.privacy.client, ""
    if not isinstance(request, TrainRequest) or not client.is_on:
        return reply
    own = next(charge for charge in charges_of(request, node) if charge.mechanism != PROMISED)
    size = plan_of(request, node).public_size if client.clips_gradients else 0
    allowed = node.policy.allowed_fabs if node.policy else ()
    checked = os.environ.get(CHECKED_BUNDLE) in allowed
    attestation = Attestation(client.name, own.unit, own.events, size, request.config.task.group, checked)
    if keeps_ledger(node.config):
        with folder_unnamed(node.config):
            head = ledger_of(node.config, request.config.task.name).release_head
    return replace(reply, attestation=attestation, ledger_head=head)
