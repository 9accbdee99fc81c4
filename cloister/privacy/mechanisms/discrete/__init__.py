"""The discrete Gaussian, exactly: integers k of probability ∝ exp(-k²/2s²), for noise without floating point.

A number is made of a block b and of L low bits, k = b·2^L + low, with s₀ = s/2^L from 256 up to 512. Let
m = b for b ≥ 0 and m = -b - 1 below, and j = low, or 2^L - low below: |k| = m·2^L + j, so that

    exp(-k²/2s²)  =  exp(-m²/2s₀²) · exp(-t),     t = (2m·2^L + j)·j / 2s².

So b is drawn with weight exp(-m²/2s₀²), low uniformly, and the pair is taken with probability exp(-t), which is
almost 1; a pair that is refused is drawn anew. Every step compares bits of the keystream with a rational number, or
with a real number known to as many bits as it takes.

sampler        `DiscreteGaussian`: the stream of numbers, and their addition to sums
tables         how blocks are looked up in bits, and what bounds t in 64-bit integers
weights        bounds for the weights of blocks, to any number of bits
decision       one number from its bits, in Python integers: what every shortcut is held to
numpy_kernel, numba_kernel
               the shortcuts: the same numbers, thousands at a time
"""
