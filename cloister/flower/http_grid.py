"""The grid over a SuperLink. Its import takes a second, which other grids save."""

# Requests of the grid to the SuperLink.
from flwr.proto import runtime_pb2 as runtime_pb2

# A reply from the objects that were fetched.
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents as inflate_object_from_contents

# The module of Flower's grid, which is the base of ours.
from flwr.superlink.grid import http_grid

HttpGrid = http_grid.HttpGrid
