"""Secure aggregation: a server learns the sum of its clients' vectors of whole numbers, and no vector of one of them.

The protocol of Bonawitz et al. (2017, the variant against active adversaries) as state machines: no transport, no
noise, no configuration. `docs/secure_aggregation.md` says what each party sees, and what is not promised.
"""
