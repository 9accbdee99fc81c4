"""Mechanisms that bound and noise contributions: mathematics, independent of Flower and of the configuration.

mechanism     the base class: a frozen value that bounds contributions, makes releases and returns their events
gaussian      the Gaussian mechanisms on the server, and their factories
clipping, metric, grid, release
              the parts of these mechanisms: bound, distance and scale of the noise, integers, noised sums
distributed   the mean under secure aggregation, with noise in shares
local, selection
              mechanisms that run on the client: noise on its update, and a choice among hypotheses
discrete      integer noise with an exact discrete Gaussian law
noise, laplace
              continuous noise from the operating system's entropy, on a grid
"""

from cloister.utils.registry import Registry

MECHANISMS = Registry(
    "mechanism",
    "cloister.mechanisms",
    {
        "global-dp": "cloister.privacy.mechanisms.gaussian:global_dp",
        "metric": "cloister.privacy.mechanisms.gaussian:metric",
    },
    "privacy.server",
)
"""Factories of mechanisms by the name in `privacy.server`: built in, or installed as a plugin."""
