"""Distributed noise: each client adds a share of it to integers of which the server receives only the sum.

    clip ─▶ truncate to steps ─▶ + share of the noise ─▶ (secure sum) ─▶ - surplus ─▶ in units of the weights

shares         the components of each client's noise, and the remaining variance after some are subtracted;
               additional numbers in the same sum, each on a grid and with noise of its own
plan           the public grid, the noise on it, the size of the ring, and the event of a round;
               a client's update in steps, its noise, and the removal of surplus noise from the sum
shared         `SharedRelease`: what server and clients ask about a round, in two forms
mean           `DistributedMean`: the mean of the clients' updates
steps          `DistributedStep`: a round as one step of DP-SGD

Mathematics only: `cloister.secure_aggregation` sums the numbers without revealing a single one.
"""
