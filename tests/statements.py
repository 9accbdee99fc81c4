"""What nodes state in their replies, for tests of what a run claims."""

from flwr.app import ConfigRecord, Message, RecordDict

from cloister.flower.messages import assume_run
from cloister.server.attested import Attested


def heard(*statements, secret=False):
    """Return what a server counts that has heard these; None: a reply without a statement."""
    assume_run()
    attested = Attested(secret)
    asked = Message(RecordDict(), 1, "train")
    asked.metadata.__dict__["_message_id"] = "1"
    for said in statements:
        content = RecordDict()
        if said is not None:
            written = said if isinstance(said, bytes) else said.to_bytes()
            content["attestation"] = ConfigRecord({"attestation": written})
        attested.count(Message(content, reply_to=asked))
    return attested
