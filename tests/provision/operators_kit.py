"""A SuperLink's state as an operator's commands reach it, without a network."""

from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from flwr.superlink.servicer.control import control_handlers

ACCOUNT = AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)


class Client:
    """Flower's client of the Control interface, without the way between it and Flower's handlers."""

    def __init__(self):
        objects = ObjectStoreFactory(FLWR_IN_MEMORY_DB_NAME)
        self.state = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), objects).state()

    def ListNodes(self, request):
        return control_handlers.list_nodes(request, ACCOUNT, self.state)

    def RegisterNode(self, request):
        return control_handlers.register_node(request, ACCOUNT, self.state)

    def UnregisterNode(self, request):
        return control_handlers.unregister_node(request, ACCOUNT, self.state)
