"""Handing whole replies to Flower, as if nobody had sent any part of them before.

Flower asks for the parts that it lacks. Whoever counts them, or the time that they take, learns which of them others
have sent. So Flower is made to ask for all of them: what it has is taken out first, and everything is put back in the
same transaction.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from logging import WARNING
from threading import Lock
from typing import Any

from fastapi import HTTPException
from flwr.common.serde import message_from_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.server.superlink.linkstate import LinkState
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore import log
from flwr.supercore.error import FlowerError
from flwr.supercore.sql_mixin import SqlMixin
from flwr.supercore.state.schema.objectstore_models import StoredObject
from sqlalchemy import update

from cloister.deploy.superlink.cleanup import delete_objects_of, delete_unread_replies, pieces
from cloister.deploy.superlink.database import one_transaction
from cloister.deploy.superlink.unfinished import Unfinished
from cloister.deploy.superlink.uploads import Upload

MAX_ATTEMPTS = 20
"""How often Flower is handed replies to one message that its database does not take, before they are given up."""


class Handover:
    """Hands Flower one reply to a message, whole or not at all.

    Args:
        flower: Flower's functions by name: `push_messages` takes an announcement, `push_object` an object.

    Attributes:
        unfinished: the replies that are being handed over.
        attempts: how often replies to each message were handed over.
        settled: the messages whose reply Flower has, or has declined.
    """

    def __init__(self, flower: Mapping[str, Callable[..., Any]]) -> None:
        self.flower = flower
        self.unfinished = Unfinished()
        self.attempts: Counter[str] = Counter()
        self.settled: set[str] = set()
        self._lock = Lock()

    def finish(self, upload: Upload, state: LinkState, **others: object) -> None:
        """Hand over the one reply to a message: Flower takes it, or declines it, and then hears of no other one.

        Args:
            upload: a whole reply; the caller holds its turn.
            state: Flower's.
            others: what else Flower's `push_object` takes.

        Raises:
            HTTPException: 503, its database does not take it now.
            FlowerError: the run is over.
        """
        if why_not := self._try_again(upload.replies_to):
            log(WARNING, "a reply of node %s is dropped: %s", upload.request.node.node_id, why_not)
        else:
            try:
                self._hand_over(upload, state, others)
            except HTTPException:  # 503 is busy, 507 is full; a node asks again after a 503 alone
                raise HTTPException(503, "the database is busy or full: try again") from None
            except FlowerError:
                upload.end()
                raise
            with self._lock:
                self.settled.add(upload.replies_to)
        upload.end()

    def forget(self, message: str) -> None:
        """Forget the attempts of a message that its node cannot answer any more."""
        with self._lock:
            self.attempts.pop(message, None)
            self.settled.discard(message)

    def _try_again(self, message: str) -> str:
        """Count an attempt to hand over a reply to this message, or say why there is none: a node may announce ever
        new ones."""
        with self._lock:
            if message in self.settled:
                return "it is a second one to one message"
            if self.attempts[message] >= MAX_ATTEMPTS:
                return f"the database did not take it in {MAX_ATTEMPTS} attempts"
            self.attempts[message] += 1
        return ""

    def _hand_over(self, upload: Upload, state: LinkState, others: Mapping[str, object]) -> None:
        """Give Flower all of a reply or, if its database does not take it, nothing.

        Raises:
            HTTPException: 503, it does not.
        """
        # A ValueError is a contradiction to what is there, or Flower has declined the reply. Nobody may hear of it: the
        # reply is taken, and goes nowhere.
        with self.unfinished.arriving(upload.replies_to), suppress(ValueError), one_transaction(state):
            _store_reply(state, upload.request)
            _take_out(state, upload.names)
            answer = self._announce(upload, state)
            self._store_objects(upload, answer, {"state": state, **others})
            delete_objects_of(state, upload.replies_to, upload.asked)
            if isinstance(state, SqlLinkState):
                delete_unread_replies(state, upload.run, upload.request.node.node_id)

    def _announce(self, upload: Upload, state: object) -> PushMessagesResponse:
        """Announce a reply to Flower.

        Raises:
            ValueError: Flower declines it.
        """
        answer: PushMessagesResponse = self.flower["push_messages"](request=upload.request, state=state)
        if isinstance(state, SqlMixin) and {*answer.objects_to_push} != {*upload.names}:
            raise ValueError("Flower declines the reply: what was taken out has to be put back")
        return answer

    def _store_objects(self, upload: Upload, answer: PushMessagesResponse, others: Mapping[str, object]) -> None:
        """Give Flower the objects that it asks for.

        Raises:
            HTTPException: 503, its database does not take them.
        """
        for name in dict.fromkeys(answer.objects_to_push):  # Flower names a part as often as it stands in the reply
            part = PushObjectRequest(
                node=upload.request.node,
                run_id=upload.run,
                object_id=name,
                object_content=upload.part(name),
                session_id=answer.session_id,
            )
            if not self.flower["push_object"](request=part, **others).stored:
                raise HTTPException(503, "the database is busy")


def _store_reply(state: object, announced: PushMessagesRequest) -> None:
    """Store a reply's metadata before any object is touched; `push_messages` finds them, and stores them once.

    A bad reply is declined here, so that the time which it takes tells nothing of what others sent.

    Raises:
        ValueError: Flower declines it.
    """
    message = message_from_proto(announced.messages_list[0])
    if isinstance(state, SqlLinkState) and state.store_message_res(message) is None:
        raise ValueError("Flower declines the reply")


def _take_out(state: object, names: Sequence[str]) -> None:
    """Have Flower ask for these objects although it has them. Nobody sees it: the transaction puts them back."""
    if isinstance(state, SqlMixin):
        gone = update(StoredObject).values(content=b"", is_available=0)
        with state.session() as session:
            for few in pieces(names):
                session.execute(gone.where(StoredObject.object_id.in_(few)))
