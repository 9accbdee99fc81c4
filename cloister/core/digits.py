"""Rounding of bounds to a few digits, so that the printed bound holds too."""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context


def at_most(value: float | None, digits: int = 4) -> str:
    """Format an upper bound (ε, δ, leakage, spent budget), rounded up.

    Args:
        value: the bound; None: there is none.
        digits: significant digits, from 1 to 9.

    Examples:
        >>> at_most(1.23401), at_most(8.0), at_most(9.99991), at_most(1e-5)
        ('1.235', '8', '10', '1e-05')
    """
    return _rounded(math.inf if value is None else value, digits, ROUND_CEILING)


def at_least(value: float, digits: int = 4) -> str:
    """Format a lower bound (a noise multiplier, a remaining budget), rounded down.

    Args:
        value: the bound.
        digits: significant digits, from 1 to 9.

    Examples:
        >>> at_least(0.89449), at_least(1.0)
        ('0.8944', '1')
    """
    return _rounded(value, digits, ROUND_FLOOR)


def rounded_up(value: float, digits: int = 4) -> float:
    """Round a positive number up, such as a calibrated noise multiplier.

    Args:
        value: positive.
        digits: significant digits.

    Examples:
        >>> rounded_up(0.123401), rounded_up(0.1)
        (0.1235, 0.1)
    """
    return float(Context(digits, ROUND_CEILING).create_decimal(repr(float(value))))


def percent_at_least(share: float) -> str:
    """Format a lower bound on a share (a confidence) in percent, rounded down.

    Args:
        share: from 0 to 1.

    Examples:
        >>> percent_at_least(0.95), percent_at_least(0.99961)
        ('95 %', '99.9 %')
    """
    return f"{at_least(100 * share, 3)} %"


def _rounded(value: float, digits: int, rounding: str) -> str:
    """Round by the first nine digits.

    Later digits come from the rounding of floats and grids. So 0.1 prints as 0.1.
    """
    if not math.isfinite(value):
        return f"{value:g}"
    shown = f"{value:.9g}"
    return f"{float(Context(digits, rounding).create_decimal(shown)):.{digits}g}"
