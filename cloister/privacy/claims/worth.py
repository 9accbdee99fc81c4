"""Worth of an ε: the best guess that it allows, and its tier.

The plan, the console, the reports and the dashboard use these words.
"""

import math

TIERS = {"strong": 1.0, "reasonable": 10.0, "weak": math.inf}
"""Largest ε of each tier, for the unit at hand.

Source: Ponomareva et al. (2023), How to DP-fy ML, arXiv:2303.00654, §5.2.
"""
LARGE_DELTA = 0.01
"""A guarantee of a larger δ is weak for any ε: with that probability it may not hold."""


def best_guess(epsilon: float, delta: float) -> float:
    """Return the largest probability that a guess between two equally likely, neighbouring datasets is right.

    The adversary knows everything but which of the two datasets D and D' was used, holds each for as likely as the
    other, sees all that was released, and guesses. Let A be what he sees when he guesses D'. With a = P(A | D) and
    b = P(not A | D') he is wrong with probability (a + b)/2. (ε, δ)-differential privacy, applied to A and to its
    complement, says 1 - b ≤ e^ε·a + δ and 1 - a ≤ e^ε·b + δ. Their sum is a + b ≥ 2(1 - δ)/(1 + e^ε), so that he is
    right with probability at most

        1 - (1 - δ)/(1 + e^ε) = (e^ε + δ)/(1 + e^ε).

    Args:
        epsilon: ε ≥ 0; infinity promises nothing.
        delta: δ from 0 to 1.

    Returns:
        From 1/2 (ε = δ = 0: seeing the release does not help) to 1.

    Guarantee: it bounds every rule of guessing, on average over what is released. For δ = 0 it bounds the posterior
        probability after each single release too; for δ > 0 something that occurs with probability δ may tell all.

    Source: Kairouz, Oh and Viswanath (2015), The Composition Theorem for Differential Privacy.

    Examples:
        >>> best_guess(0.0, 0.0), round(best_guess(1.0, 1e-5), 3)
        (0.5, 0.731)
    """
    wrong = math.exp(-epsilon) / (1 + math.exp(-epsilon))  # 1/(1 + e^ε), without an overflow
    return 1 - (1 - delta) * wrong


def tier(epsilon: float, delta: float = 0.0) -> str:
    """Return `strong`, `reasonable` or `weak`.

    Args:
        epsilon, delta: as in `best_guess`.

    Examples:
        >>> tier(1.0), tier(8.0, 1e-5), tier(12.0), tier(0.5, 0.1)
        ('strong', 'reasonable', 'weak', 'weak')
    """
    if delta > LARGE_DELTA:
        return "weak"
    return next(name for name, largest in TIERS.items() if epsilon <= largest)
