"""The complete graph of members that share secrets and masks, with its guarantee."""

from dataclasses import dataclass

from cloister.core.errors import ProtocolError
from cloister.secure_aggregation.canonical import Item


@dataclass(frozen=True)
class Complete:
    """The complete graph: every member shares with every other one. t shares recover a secret.

    Args:
        threshold: t. The sum is unmasked only if t survivors sign.
        colluding: c. The server together with up to c members learns only the sum.
    """

    threshold: int
    colluding: int

    def require(self, members: int) -> None:
        """Refuse a cohort without a guarantee.

        Two lists of survivors with t signatures each have at least 2t − n signers in common. If these are more than c,
        one of them is honest, and it signs once. So 2t > n + c permits one list only.

        Args:
            members: n, size of the cohort.

        Raises:
            ProtocolError: the threshold is larger than n, or 2t ≤ n + c.
        """
        if self.threshold > members or 2 * self.threshold <= members + self.colluding:
            raise ProtocolError(
                f"a cohort must have {self.threshold} to {2 * self.threshold - self.colluding - 1} members, for a"
                f" threshold of {self.threshold} with {self.colluding} colluding members; found {members}"
            )

    @property
    def honest(self) -> int:
        """Return the least number of honest inputs in a sum, t − c: of t survivors at most c collude."""
        return self.threshold - self.colluding

    def items(self) -> tuple[Item, ...]:
        """Return the items for the terms that members sign: the kind, t and c."""
        return "complete", self.threshold, self.colluding
