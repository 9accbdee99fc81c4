"""A key that was unregistered stays in Flower's database: who registers it again is told so.

Flower answers "already in use" for the key of a node that takes part and for one that was sent away. The operator's
script has to tell the one from the other.
"""

from typing import Any

from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.superlink.servicer.control import control_handlers

REVOKED = "its node was unregistered"
"""What the answer holds for a key of a node that was sent away; `register.sh` looks for it."""


def install() -> None:
    """Put our answer in the place of Flower's."""
    plain = vars(control_handlers)["register_node"]
    if not hasattr(plain, "plain"):
        vars(control_handlers)["register_node"] = telling(plain)


def telling(plain: Any) -> Any:
    """Flower's function that registers a node, with more to say about a key that it does not take."""

    def register_node(request: Any, account: Any, state: Any) -> Any:
        try:
            return plain(request, account, state)
        except FlowerError as error:
            taken = error.code == ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE
            if taken and state.get_node_id_by_public_key(request.public_key) is None:
                raise FlowerError(error.code, error.message, public_details=REVOKED) from None
            raise

    vars(register_node)["plain"] = plain
    return register_node
