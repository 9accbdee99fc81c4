"""What a run does beside a client's mechanism that its guarantee depends on."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cloister.privacy.accounting.events import Event, Pure, Unaccounted

SEEDED = "the noise is seeded: whoever knows privacy.noise-seed can remove it"
EXACT = "privacy.choice is 'exact': which hypothesis suits the examples is found out without noise"


@dataclass(frozen=True)
class Circumstances:
    """How a run draws a client's noise, and what it has the client choose.

    Attributes:
        seeded: whether the noise can be repeated by whoever knows its seed.
        hypotheses: k that a client chooses among in every round; 1: there is no choice.
        private: whether the client chooses by noised losses.
        choice_epsilon: ε of one private choice.
    """

    seeded: bool = False
    hypotheses: int = 1
    private: bool = True
    choice_epsilon: float = 0.0

    @property
    def chooses_privately(self) -> bool:
        """Whether a round has a private choice, which is one more release."""
        return self.hypotheses > 1 and self.private

    def caveats(self) -> list[str]:
        """Why nothing can be claimed for a client, whatever its mechanism; empty if something can."""
        caveats = [SEEDED] if self.seeded else []
        if self.hypotheses > 1 and not self.private:
            caveats.append(EXACT)
        return caveats

    def events(self, caveats: Iterable[str], releases: Callable[[], Iterable[Event]]) -> tuple[Event, ...]:
        """Return the events of a reply: its releases and a private choice, or one for which nothing is claimed.

        Args:
            caveats: of the mechanism.
            releases: returns what the mechanism releases in a reply; called where there is no caveat.
        """
        if reasons := "; ".join([*caveats, *self.caveats()]):
            return (Unaccounted(reasons),)
        return (*releases(), *([Pure(self.choice_epsilon)] if self.chooses_privately else []))

    def epsilon_of_choices(self, rounds: int) -> float:
        """ε of all private choices of a client that took part in so many rounds."""
        return rounds * self.choice_epsilon if self.chooses_privately else 0.0

    def parameters(self) -> dict[str, str | float]:
        """The parameters of a choice, by configuration key; empty if there is none."""
        if self.hypotheses < 2:
            return {}
        return {
            "privacy.choice": "private" if self.private else "exact",
            "privacy.choice-epsilon": self.choice_epsilon,
        }
