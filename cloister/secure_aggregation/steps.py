"""State machine of a protocol party whose state each step consumes."""

from threading import Lock
from typing import NoReturn, TypeVar

from cloister.core.errors import ProtocolError

State = TypeVar("State")


class Steps:
    """The state of a protocol party, which each step takes and replaces.

    Guarantee:
        Of several concurrent threads, one receives the state. A step that raises leaves no state. So no step can run
        twice, in another order, or after a refusal, and the party keeps no secret.
    """

    def __init__(self, first: object) -> None:
        self._state: object = first
        self._taking = Lock()

    def take(self, kind: type[State]) -> State:
        """Take the state, which must be of the kind that the step needs.

        Raises:
            ProtocolError: this step is not the next one, has run already, or an earlier step has raised.
        """
        with self._taking:
            state, self._state = self._state, None
        if not isinstance(state, kind):
            raise ProtocolError("a step of the protocol was asked for out of turn; this attempt is over")
        return state

    def leave(self, state: object) -> None:
        """Set the state for the next step."""
        self._state = state

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles: a copy could run a step again.

        Raises:
            ProtocolError: always.
        """
        raise ProtocolError("the state of an attempt cannot be copied or saved: it could be used twice")
