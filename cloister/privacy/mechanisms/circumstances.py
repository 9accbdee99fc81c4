"""Settings of a client's run, beside its mechanism, on which the guarantee depends."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cloister.privacy.accounting.events import Event, Pure, Unaccounted

SEEDED = "the noise is seeded: whoever knows privacy.noise-seed can remove it"
EXACT = "privacy.choice is 'exact': which hypothesis suits the examples is found out without noise"


@dataclass(frozen=True)
class Circumstances:
    """Source of a client's noise, and the client's choice among hypotheses.

    Attributes:
        seeded: whether the noise can be repeated from its seed.
        hypotheses: k, number of hypotheses that a client chooses from in every round; 1: no choice.
        private: whether the client chooses by noised losses.
        choice_epsilon: ε of one private choice.
    """

    seeded: bool = False
    hypotheses: int = 1
    private: bool = True
    choice_epsilon: float = 0.0

    @property
    def chooses_privately(self) -> bool:
        """Return whether each round has a private choice, which is one more release."""
        return self.hypotheses > 1 and self.private

    def caveats(self) -> list[str]:
        """Return reasons against claims for a client under any mechanism; may be empty."""
        caveats = [SEEDED] if self.seeded else []
        if self.hypotheses > 1 and not self.private:
            caveats.append(EXACT)
        return caveats

    def events(self, caveats: Iterable[str], releases: Callable[[], Iterable[Event]]) -> tuple[Event, ...]:
        """Return the events of one reply.

        They are its releases and a private choice, or one `Unaccounted` event if there is a caveat.

        Args:
            caveats: reasons against a claim for the mechanism.
            releases: returns the releases of the mechanism in a reply; called only if there is no caveat.
        """
        if reasons := "; ".join([*caveats, *self.caveats()]):
            return (Unaccounted(reasons),)
        return (*releases(), *([Pure(self.choice_epsilon)] if self.chooses_privately else []))

    def epsilon_of_choices(self, rounds: int) -> float:
        """Return ε of all private choices of a client in this number of rounds."""
        return rounds * self.choice_epsilon if self.chooses_privately else 0.0

    def parameters(self) -> dict[str, str | float]:
        """Return the parameters of the choice, by configuration key; empty without a choice."""
        if self.hypotheses < 2:
            return {}
        return {
            "privacy.choice": "private" if self.private else "exact",
            "privacy.choice-epsilon": self.choice_epsilon,
        }
