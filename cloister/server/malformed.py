"""A reply that cannot be put together costs this reply, and not the round.

A client writes the objects that its reply is made of. Flower's grid confirms a reply, so that it is gone at the
SuperLink, before it puts its objects together; an object that cannot be read ends the run then, and takes with it every
reply that was pulled in the same call. Flower has no other place where one reply could be left out.
"""

from collections.abc import Callable
from typing import Any

from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.date import now
from flwr.superlink.grid import http_grid

from cloister.server.reply_size import MAXIMUM

Pull = Callable[..., dict[str, bytes]]
NAME, PULL = "inflate_object_from_contents", "pull_objects"


def install() -> None:
    """Have Flower's grid take an unreadable reply for an error of its own, and fetch each of its objects once."""
    for name, ours in ((NAME, contained), (PULL, each_once)):
        plain = vars(http_grid)[name]
        if not hasattr(plain, "plain"):
            vars(http_grid)[name] = ours(plain)


def each_once(pull: Pull) -> Pull:
    """Flower's function that fetches the objects of a reply, each of them once.

    A client decides how often an object stands in its reply: fetched as often, one of 32 MiB took gigabytes, and
    replies of others came too late meanwhile.

    Args:
        pull: takes the ids of objects, and gives their contents by id.
    """

    def fetched(object_ids: list[str], **others: object) -> dict[str, bytes]:
        return pull(object_ids=list(dict.fromkeys(object_ids)), **others)

    vars(fetched)["plain"] = pull
    return fetched


def contained(inflate: Any) -> Any:
    """Flower's function that puts a message together, with an error message in place of any exception.

    Which message it answers is not known then: its node counts as one that has not replied.

    Args:
        inflate: takes the id of the message and the contents of its objects.
    """

    def put_together(message_id: str, contents: dict[str, bytes]) -> Message:
        try:
            MAXIMUM.require(contents)
            found = inflate(message_id, contents)
        except Exception as error:  # whatever a client can write; without its text, which has what it wrote
            return _unreadable(type(error).__name__)
        return found if isinstance(found, Message) else _unreadable("no message")

    vars(put_together)["plain"] = inflate
    return put_together


def _unreadable(why: str) -> Message:
    own = {"src_node_id": SUPERLINK_NODE_ID, "dst_node_id": SUPERLINK_NODE_ID}
    metadata = Metadata(
        run_id=0,
        message_id="",
        reply_to_message_id="",
        group_id="",
        created_at=now().timestamp(),
        ttl=0,
        message_type=SYSTEM_MESSAGE_TYPE,
        **own,
    )
    reason = f"a reply cannot be put together: {why}"
    return make_message(metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason))
