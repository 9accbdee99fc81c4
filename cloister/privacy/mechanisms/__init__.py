"""Mechanisms that bound and noise contributions: mathematics, independent of Flower and of the configuration.

mechanism     the base class: a frozen value that bounds contributions, makes releases and returns their events
gaussian      the Gaussian mechanisms on the server, and their factories
clipping, metric, grid, release
              the parts of these mechanisms: clip, scale of the noise, integers, released sums
noise         random numbers from the operating system's entropy, in blocks, and Gaussian noise on a grid
discrete      integer noise with an exact discrete Gaussian law
distributed   noise under secure aggregation, in shares of the clients
local, laplace, selection
              mechanisms that run on the client
kmeans        clustering of the models that the server receives
"""

from cloister.utils.registry import Registry

MECHANISMS = Registry(
    "mechanism",
    "cloister.mechanisms",
    {
        "global-dp": "cloister.privacy.mechanisms.gaussian:global_dp",
        "metric": "cloister.privacy.mechanisms.gaussian:metric",
    },
)
"""Factories of mechanisms by the name in `privacy.server`: built in, or installed as a plugin."""
