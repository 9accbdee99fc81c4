"""Noise in shares: every client adds a part of it to whole numbers of which a server learns the sum alone.

    clip ─▶ truncate to steps ─▶ + share of the noise ─▶ (sum by others) ─▶ - surplus ─▶ in units of the weights

shares         what each client's noise is made of, and how much is left when some of it is taken off again
beside         a number that travels beside an update, on a grid and with noise of its own
plan           the public grid, the noise on it, the room that the sum needs, and the event of a round
whole          a client's update in steps, its noise, and what the server makes of the sum

Mathematics only: who adds the numbers up, and why nobody sees one of them, is none of this folder's business.
"""
