"""Secure aggregation: the server learns the sum of the clients' integer vectors, and no single vector.

The protocol of Bonawitz et al. (2017, the variant against active adversaries) as state machines: no transport, no
noise, no configuration. `docs/secure_aggregation.md` lists the view of each party, and the limits of the guarantee.
"""
