"""How contributions are bounded and noised: the mathematics, without Flower and without configuration.

mechanism     the noun: a frozen value that bounds, releases, and says what that costs
gaussian      the Gaussian mechanisms on the server; noise_scale: what scales their noise; named: by configuration name
clipping, distance, release, trimmed_mean
              what they are made of
keystream, noise
              random numbers from the operating system's entropy, in blocks, on a grid
discrete      the same of an exact law, as integers
laplace, local, local_update, selection, kmeans
              what clients do to what they send, and what the server can do with that
"""

from cloister.core.registry import Registry

MECHANISMS = Registry(
    "mechanism",
    "cloister.mechanisms",
    {
        "global-dp": "cloister.privacy.mechanisms.named:global_dp",
        "metric": "cloister.privacy.mechanisms.named:metric",
    },
)
"""What makes a mechanism of its options, by the name in `privacy.server`: built in, or installed beside Cloister."""
