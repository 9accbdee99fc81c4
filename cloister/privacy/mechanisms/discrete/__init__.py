"""Exact sampling from the discrete Gaussian: integers k of probability ∝ exp(-k²/2s²), without floating point.

A number is made of a block b and of L low bits, k = b·2^L + low, with s₀ = s/2^L from 256 up to 512. Let
m = b for b ≥ 0 and m = -b - 1 below, and j = low, or 2^L - low below: |k| = m·2^L + j, so that

    exp(-k²/2s²)  =  exp(-m²/2s₀²) · exp(-t),     t = (2m·2^L + j)·j / 2s².

So b is drawn with weight exp(-m²/2s₀²), low uniformly, and the pair is taken with probability exp(-t), which is
almost 1; a refused pair is drawn anew. Every step compares bits of the keystream with a rational number, or with a
real number computed to as many bits as the comparison needs.

sampler        `DiscreteGaussian`: the stream of numbers, and their addition to sums
tables         bounds for the weights of blocks, to any number of bits, and look-up tables from bits to blocks
numpy_kernel   `number_of`, one number from its bits in Python integers: the reference; thousands at a time in NumPy
numba_kernel   the same numbers, compiled
"""
