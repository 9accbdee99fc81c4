"""Memory check for rounds whose replies must all be held together."""

import numpy as np

from cloister.core.arrays import Layout
from cloister.core.errors import ConfigError
from cloister.core.memory import free_memory


def require_memory(component: str, layout: Layout, clients: int) -> None:
    """Refuse a round whose replies do not fit into memory, before a client is asked.

    If the system does not report its free memory, every round is accepted.

    Args:
        component: component that needs all replies of a round together.
        layout: of a reply.
        clients: n, largest number of clients asked.

    Raises:
        ConfigError: n replies need more than the free memory.
    """
    one = sum(size * np.dtype(dtype).itemsize for size, dtype in zip(layout.sizes, layout.dtypes, strict=True))
    free = free_memory()
    if free is not None and free < clients * one:
        raise ConfigError(
            f"{component} has to see all replies of a round together: {clients} clients with {_read(one)} each need "
            f"{_read(clients * one)}, and {_read(free)} of memory are free. Ask fewer clients "
            "(strategy.fraction-train), train a smaller model, or give the server more memory. A mean under "
            "privacy.server = 'global-dp' in placement 'update' adds replies up as they come, and needs none of this"
        )


def _read(count: int) -> str:
    """Format a number of bytes for people."""
    unit, name = next(
        (each for each in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")) if count >= each[0]), (1, "bytes")
    )
    return f"{count / unit:.3g} {name}"
