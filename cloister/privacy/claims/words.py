"""Words that more than one place says in the same way."""

WEAK = 20.0
"""An ε above this multiplies the odds of any inference by up to e²⁰, half a billion: it promises next to nothing."""


def strength(epsilon: float | None) -> str:
    """What to call a sound claim of this ε; None: it is not known."""
    if epsilon is not None and epsilon > WEAK:
        return "sound, but it promises next to nothing"
    return "sound"
