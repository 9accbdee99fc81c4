"""Asks a server's app to send again what a busy or full database did not take.

Flower answers only that a part was not stored, whatever the reason. The app then ends the run: so a run ended whenever
the database was locked for half a minute, or full for a moment.
"""

from types import ModuleType
from typing import ClassVar

from fastapi import HTTPException
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushAppMessagesResponse
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkState
from flwr.superlink.servicer.runtime import runtime_handlers

from cloister.deploy.superlink.database import errors_inside
from cloister.deploy.superlink.in_front import InFront


class RetryWhenBusy(InFront):
    """Answers 503 to a server's app when the database stored nothing: Flower's clients then ask again."""

    handlers: ClassVar[ModuleType] = runtime_handlers
    names = ("push_messages", "push_object")

    def push_messages(self, request: PushAppMessagesRequest, state: LinkState, task: Task) -> PushAppMessagesResponse:
        """Announce messages; answer 503 where the database is busy or full.

        Raises:
            HTTPException: 503, the database is busy or full.
        """
        with errors_inside() as found:
            try:
                answer: PushAppMessagesResponse = self.inner["push_messages"](request, state, task)
            except HTTPException:
                _raise_if_failed(found)
                raise
        return answer

    def push_object(self, request: PushObjectRequest, state: LinkState, task: Task) -> PushObjectResponse:
        """Store a part of a message; answer 503 where the database is busy or full.

        Raises:
            HTTPException: 503, the database is busy or full.
        """
        with errors_inside() as found:
            answer: PushObjectResponse = self.inner["push_object"](request, state, task)
        if not answer.stored:
            _raise_if_failed(found)
        return answer


def _raise_if_failed(found: list[str]) -> None:
    """Have the app ask again if the database failed.

    Raises:
        HTTPException: 503, it did.
    """
    if found:
        raise HTTPException(503, f"{found[-1]}: try again")
