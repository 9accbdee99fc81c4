"""Memory for the replies of a round, where something has to see all of them together."""

import numpy as np

from cloister.core.arrays import Layout
from cloister.core.errors import ConfigError
from cloister.core.memory import free_memory


def require_memory(component: str, layout: Layout, clients: int) -> None:
    """Refuse a round whose replies cannot all be held, before anybody is asked.

    Nothing is refused where the system does not tell how much memory there is.

    Args:
        component: what has to see all replies of a round together.
        layout: of a reply.
        clients: n, how many are asked at most.

    Raises:
        ConfigError: n replies are more than the memory that is there.
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
    """Bytes, for a person."""
    unit, name = next(
        (each for each in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")) if count >= each[0]), (1, "bytes")
    )
    return f"{count / unit:.3g} {name}"
