"""A reply counts as the node's that was asked: other nodes can answer in its name over Flower's own SuperLink."""

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, ErrorCode
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from open_link import TRAINED, Client, content, labelled
from served_app import answered, given, grid_of, sent

from cloister.deploy.credentials import new_node_key
from cloister.privacy.claims.premises import of_transport
from cloister.utils.keys import Answered, node_key
from cloister.utils.wire import PACKED, SIGNED, packed

NOT_ITS_OWN = "its signature is not one of this reply by the key with which its SuperNode authenticates"
NOT_SIGNED = "it is not signed, as replies of this node are"


class Site:
    """A node whose SuperNode authenticates with a key, and the file of the key."""

    def __init__(self, link, path):
        private, _ = new_node_key()
        path.write_bytes(private)
        self.file, self.key = path, node_key(private, "key")
        public = public_key_to_bytes(self.key.public_key())
        identity = link.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public, 0)
        link.state.activate_node(identity, 1000.0)
        self.node = Client(link, identity)

    @property
    def id(self):
        return self.node.id

    def answers(self):
        return answered(self.node, key=self.file)


@pytest.fixture
def grid(link):
    return grid_of(link)


@pytest.fixture
def sites(link, tmp_path):
    return [Site(link, tmp_path / str(number)) for number in range(2)]


def asked(grid, *sites):
    """The ids of a round's messages, one for each site, which the app has chosen from the list of nodes."""
    assert {site.id for site in sites} <= set(grid.get_node_ids())
    return sent(grid, [site.node for site in sites])[1]


def in_the_name_of(site, thief, reply):
    """Send a reply as another node does that poses as this one."""
    thief.node.send(labelled(reply, site.id, site.node.link.run), src_node_id=site.id)


def signed_by(key, message, node, value=TRAINED):
    """The reply to a message as a node with this id would sign it."""
    sign = Answered(message.metadata.run_id, node, message.metadata.message_id).signer(key)
    return Message(RecordDict({PACKED: packed(content(value), sign)}), reply_to=message)


def reason(replies):
    """The error that is all there is of the replies."""
    (reply,) = replies
    assert reply.has_error()
    return reply.error.reason


def authentic(grid):
    """Return the run's evidence that replies come from the nodes that were asked."""
    transport = grid.transport
    (found,) = [
        premise.known
        for premise in of_transport(False, transport.gated, transport.packed, transport.signed)
        if premise.name == "authentic"
    ]
    return found


def test_replies_that_their_nodes_signed_count_and_attest_who_sent_them(grid, sites):
    ids = asked(grid, *sites)
    for site in sites:
        site.answers()
    replies = list(grid.pull_messages(ids))
    assert {reply.metadata.src_node_id for reply in replies if reply.has_content()} == {site.id for site in sites}
    assert grid.transport.signed and authentic(grid) == "attested"


def test_a_reply_of_another_node_is_refused(grid, sites, caplog):
    """D2: over Flower's own SuperLink the first reply to a message wins, whoever sends it."""
    site, thief = sites
    ids = asked(grid, site)
    in_the_name_of(site, thief, signed_by(thief.key, given(site.node), site.id))
    assert reason(grid.pull_messages(ids)).startswith(NOT_ITS_OWN)
    assert f"node {site.id} does not count" in caplog.text


def test_without_the_check_the_reply_of_another_node_would_count(grid, sites, monkeypatch):
    """A broken twin: what the test before this one sees."""
    monkeypatch.setattr(Answered, "is_signed", lambda *_: True)
    site, thief = sites
    ids = asked(grid, site)
    in_the_name_of(site, thief, signed_by(thief.key, given(site.node), site.id))
    assert [reply.metadata.src_node_id for reply in grid.pull_messages(ids) if reply.has_content()] == [site.id]


def test_an_older_reply_of_the_same_node_is_refused(grid, sites):
    site, thief = sites
    ids = asked(grid, site)
    old = site.answers()
    assert len(list(grid.pull_messages(ids))) == 1
    ids = asked(grid, site)
    in_the_name_of(site, thief, Message(RecordDict({PACKED: old.content[PACKED]}), reply_to=given(site.node)))
    assert reason(grid.pull_messages(ids)).startswith(NOT_ITS_OWN)


def test_changed_content_is_refused(grid, sites):
    site, thief = sites
    ids = asked(grid, site)
    reply = signed_by(site.key, given(site.node), site.id)
    data = bytearray(reply.content[PACKED][SIGNED])
    data[40] ^= 1
    reply.content[PACKED] = ConfigRecord({SIGNED: bytes(data)})
    in_the_name_of(site, thief, reply)
    assert reason(grid.pull_messages(ids)).startswith(NOT_ITS_OWN)


UNSIGNED = {
    "packed": lambda message: Message(RecordDict({PACKED: packed(content(TRAINED))}), reply_to=message),
    "named arrays": lambda message: Message(content(TRAINED), reply_to=message),
    "an error": lambda message: Message(Error(1, "BudgetExhausted: no"), reply_to=message),
    "an error of an app": lambda message: Message(
        Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "PolicyError: no"), reply_to=message
    ),
}


@pytest.mark.parametrize("forged", UNSIGNED.values(), ids=UNSIGNED)
def test_an_unsigned_reply_of_a_node_that_signs_is_a_failure_and_nothing_else(grid, sites, forged):
    site, thief = sites
    ids = asked(grid, site)
    site.answers()
    assert len(list(grid.pull_messages(ids))) == 1
    ids = asked(grid, site)
    in_the_name_of(site, thief, forged(given(site.node)))
    assert reason(grid.pull_messages(ids)) == NOT_SIGNED
    assert authentic(grid) == "attested", "what is refused does not count"


def test_an_error_that_the_node_signed_is_told(grid, sites):
    (site, _), refused = sites, Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "PolicyError: no")
    ids = asked(grid, site)
    answered(site.node, app=lambda message, _: Message(refused, reply_to=message), key=site.file)
    assert reason(grid.pull_messages(ids)) == refused.reason and grid.transport.signed


def test_a_node_that_never_signs_counts_and_the_premise_stays_assumed(grid, sites):
    """A SuperNode without authentication has a key as well, which its app cannot read."""
    signs, does_not = sites
    ids = asked(grid, *sites)
    signs.answers()
    answered(does_not.node)
    assert all(reply.has_content() for reply in grid.pull_messages(ids))
    assert not grid.transport.signed and authentic(grid) == "assumed"


def test_a_node_whose_configuration_names_another_key_is_told_so_in_the_log(grid, sites, caplog):
    site, other = sites
    ids = asked(grid, site)
    answered(site.node, key=other.file)
    assert "its node-key has to name that key" in reason(grid.pull_messages(ids)) and str(site.id) in caplog.text


def test_a_signed_reply_takes_as_many_requests_as_one_that_is_not(grid, sites):
    """No request is made for them, and none for a signature, which is no object of its own."""
    ids = asked(grid, sites[0])
    sites[0].answers()
    grid._client.requests.clear()
    assert len(list(grid.pull_messages(ids))) == 1
    assert len(grid._client.requests) == 5 and "get_nodes" not in grid._client.requests
