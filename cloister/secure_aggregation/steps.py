"""A state that each step takes away, and the next step needs."""

from threading import Lock
from typing import NoReturn, TypeVar

from cloister.core.errors import ProtocolError

State = TypeVar("State")


class Steps:
    """Where a party of the protocol stands: one state, which the step that works with it takes.

    Guarantee:
        Of threads that ask at the same time one gets the state. A step that fails or refuses leaves no state. So
        nothing can be done twice, in another order, or after a refusal, and no secret stays in the party's hands.
    """

    def __init__(self, first: object) -> None:
        self._state: object = first
        self._taking = Lock()

    def take(self, kind: type[State]) -> State:
        """Take the state, which must be of the kind that a step needs.

        Raises:
            ProtocolError: this step is not the next one, was made already, or a step before it was refused.
        """
        with self._taking:
            state, self._state = self._state, None
        if not isinstance(state, kind):
            raise ProtocolError("a step of the protocol was asked for out of turn; this attempt is over")
        return state

    def leave(self, state: object) -> None:
        """Leave the state that the next step needs."""
        self._state = state

    def end(self) -> None:
        """Forget the state: no step follows."""
        self._state = None

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles: a copy could make a step again.

        Raises:
            ProtocolError: always.
        """
        raise ProtocolError("the state of an attempt cannot be copied or saved: it could be used twice")
