"""Mechanisms that bound and noise contributions: mathematics, independent of Flower and of the configuration.

mechanism     the base class: a frozen value that bounds contributions, makes releases and returns their events
gaussian      the Gaussian mechanisms on the server; noise_scale: the scale of their noise; named: their factories
clipping, distance, release, trimmed_mean
              the parts of these mechanisms
keystream, noise
              random numbers from the operating system's entropy, in blocks, on a grid
discrete      integer noise with an exact discrete Gaussian law
laplace, local, local_update, selection, kmeans
              mechanisms that run on the client, and clustering of the models that the server receives
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
