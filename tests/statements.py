"""Statements of nodes in their replies, for tests of a run's claims."""

from flwr.app import ConfigRecord, Message, RecordDict

from cloister.flower.messages import assume_run
from cloister.server.client_claims import Attested


def heard(*statements, secret=False):
    """Return what a server counts that has heard these; None: a reply without a statement."""
    attested = Attested(secret)
    asked = [requested(1) for _ in statements]
    list(attested.counted(asked, [replied(request, said) for request, said in zip(asked, statements, strict=True)]))
    return attested


def requested(node):
    """Return a request to train."""
    assume_run()
    asked = Message(RecordDict(), node, "train")
    asked.metadata.__dict__["_message_id"] = "1"
    return asked


def replied(request, said):
    """Return a reply that states this, an attestation or bytes; None: nothing."""
    content = RecordDict()
    if said is not None:
        written = said if isinstance(said, bytes) else said.to_bytes()
        content["attestation"] = ConfigRecord({"attestation": written})
    return Message(content, reply_to=request)
