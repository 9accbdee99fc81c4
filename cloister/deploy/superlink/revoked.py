"""A key that was unregistered stays in Flower's database: who registers it again is told so.

Flower answers "already in use" for the key of a node that takes part and for one that was sent away. The operator's
script has to tell the one from the other.
"""

from types import ModuleType
from typing import Any, ClassVar

from cloister.deploy.superlink.in_front import InFront
from cloister.flower.superlink import ApiErrorCode, FlowerError, control_handlers

REVOKED = "its node was unregistered"
"""What the answer holds for a key of a node that was sent away; `register.sh` looks for it."""


class RevokedKeys(InFront):
    """Tells an operator why a key is not taken."""

    handlers: ClassVar[ModuleType] = control_handlers
    names = ("register_node",)

    def register_node(self, request: Any, account: Any, state: Any) -> Any:
        """Register a node.

        Raises:
            FlowerError: as Flower's, with more to say about the key of a node that was sent away.
        """
        try:
            return self.inner["register_node"](request, account, state)
        except FlowerError as error:
            taken = error.code == ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE
            if taken and state.get_node_id_by_public_key(request.public_key) is None:
                raise FlowerError(error.code, error.message, public_details=REVOKED) from None
            raise
