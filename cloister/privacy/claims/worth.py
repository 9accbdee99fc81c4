"""What an ε is worth: the best guess that it allows, and from which one on it protects nobody in practice.

The one threshold, and the words for it, that the plan, the console, the reports and the dashboard go by. A line that
shows ε without its δ is judged as if δ were 0; the sentences of the report count it in.
"""

import math

SURE = 0.99
"""A guess that may be right more often than this is as good as certain: above ε = 4.6."""
NO_PROTECTION = "no protection in practice"


def best_guess(epsilon: float, delta: float) -> float:
    """The largest probability with which a guess between two equally likely, neighbouring datasets can be right.

    Somebody knows everything but which of the two datasets D and D' was used, holds each for as likely as the other,
    sees all that was released, and guesses. Let A be what he sees when he guesses D'. With a = P(A | D) and
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


def is_practical(epsilon: float | None, delta: float = 0.0) -> bool:
    """Whether a guarantee with this ε leaves doubt about a guess; None: there is nothing to judge.

    Args:
        epsilon, delta: as in `best_guess`.

    Examples:
        >>> is_practical(4.5), is_practical(8.0)
        (True, False)
    """
    return epsilon is None or best_guess(epsilon, delta) <= SURE
