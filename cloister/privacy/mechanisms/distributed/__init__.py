"""Distributed noise: each client adds a share of it to integers of which the server receives only the sum.

    clip ─▶ truncate to steps ─▶ + share of the noise ─▶ (secure sum) ─▶ - surplus ─▶ in units of the weights

shares         the components of each client's noise, and additional numbers in the same sum, with noise of their own
plan           the public grid, noise, ring and event of a round; a client's update in steps, and surplus noise
mean           the mechanism: the mean of updates under secure aggregation

Mathematics only: `cloister.secure_aggregation` sums the numbers without revealing a single one.
"""
