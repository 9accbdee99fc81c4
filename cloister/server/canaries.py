"""Canary clients: synthetic updates by which a run measures the privacy leakage of its own releases.

    coins, directions ──▶ canaries with coin 1 join the cohort ──▶ [the mechanism] ──▶ a score for every canary

A canary is an update in a random direction of its own, longer than the clipping norm. Its contribution has norm C. A
secret coin decides once whether the canary takes part in every round or in no round. The score of a canary is the
projection of the releases on its direction. Coins and scores bound ε from below (`cloister.audits.canaries`).

**Claims about real clients hold with canaries too.** Neighbours differ in the contribution of one real client. Canaries
are drawn from the operating system's entropy, independently of the clients: both neighbours have the same ones. An
adversary with all canaries can subtract them from a release. The result is the release of the real clients, with the
same noise.

**Canaries cost accuracy.** The mean is taken over the clients and the expected number of canaries, half of all. The
model moves less by that factor, and the canaries push it.

Sources: Andrew et al. (2023), arXiv:2302.03098, for clients of random directions; Steinke, Nasr, Jagielski (2023),
arXiv:2305.08846, for coins and one run.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Self, cast

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import DTypeLike, NDArray

from cloister.privacy.mechanisms.mechanism import Contributions
from cloister.server.screening import MAX_EXAMPLES
from cloister.utils.arrays import Row, State
from cloister.utils.cohort import Cohort
from cloister.utils.threads import Span, for_each_span, spans

KEY = 16
"""Bytes."""
LENGTH = 10.0
"""Norm of a canary's update in units of the clipping norm. It is above 1, so that faulty clipping is detected."""
GUESSES_PER_ROOT = 3
"""Guesses of an audit for each √m. The bound is close to the best for m = 100 to 1,000 and every ε."""
SIGNS_PER_BLOCK = 128
"""Signs per block of the cipher: one for each bit."""
SIGNS = 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32) - 1
"""The eight signs for each byte, shape (256, 8)."""
MEASURABLE = 64
"""Smallest size of an array from which its noise can be estimated."""
SLENDERNESS = 64
"""Ratio of the width of the blocks of a release to their number. Blocks are compared to find noise that repeats."""


@dataclass(frozen=True)
class Directions:
    """Independent random signs, p for each canary: a direction of norm √p, equally likely everywhere.

    No sign is stored. Each range is generated from AES in counter mode, at the canary's own counter.

    Attributes:
        key: of the cipher.
    """

    key: bytes

    def signs(self, canary: int, layer: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return the signs of a canary for the parameters `start` to `stop` of an array, ±1.

        Args:
            canary, layer: indices of the canary and of the array, from 0.
            start, stop: range of parameters in the array.
        """
        first = start - start % SIGNS_PER_BLOCK
        place = canary << 96 | layer << 64 | first // SIGNS_PER_BLOCK
        keystream = Cipher(algorithms.AES(self.key), modes.CTR(place.to_bytes(16))).encryptor()
        drawn = np.frombuffer(keystream.update(bytes(-(-(stop - first) // 8))), np.uint8)
        return np.take(SIGNS, drawn, axis=0, mode="clip").ravel()[start - first : stop - first]


@dataclass(frozen=True)
class Canaries:
    """m canaries and their scores over some rounds.

    Attributes:
        directions: of their updates.
        coins: True for each canary that takes part, shape (m,); independent and fair.
        scores: evidence that each canary takes part, shape (m,). Its mean is 1 for every round with the canary.
        rounds: number of rounds scored.
        size: p, parameters of the model; 0 before the first round.
        seeded: True if a seed determines coins and directions. The seed then reveals both.

    Guarantee: coins and directions do not depend on any client.
    """

    directions: Directions
    coins: NDArray[np.bool_]
    scores: NDArray[np.float64]
    rounds: int = 0
    size: int = 0
    seeded: bool = False

    @classmethod
    def drawn(cls, count: int, seed: int | None = None) -> Self:
        """Draw new canaries.

        Args:
            count: m ≥ 0.
            seed: source of the canaries; None for the operating system's entropy. Equal seeds give equal canaries.
        """
        size = KEY + -(-count // 8)
        words = hashlib.shake_256(f"cloister canaries {seed}".encode())
        secret = os.urandom(size) if seed is None else words.digest(size)
        coins = np.unpackbits(np.frombuffer(secret[KEY:], np.uint8), count=count).astype(bool)
        return cls(Directions(secret[:KEY]), coins, np.zeros(count), seeded=seed is not None)

    def __len__(self) -> int:
        return len(self.coins)

    def joined(self, contributions: Contributions, bound: float) -> Contributions:
        """Return the clients' contributions with those of the canaries that take part.

        The public size of the cohort grows by the expected number of canaries, m/2, for all coins.

        Args:
            contributions: of the clients.
            bound: C, the largest L2 norm of one client's contribution.
        """
        if not len(self):
            return contributions
        cohort, present = contributions.cohort, np.flatnonzero(self.coins)
        height = sign_in(contributions.server_round) * LENGTH * bound / math.sqrt(cohort.layout.size)
        # Each piece supports the slicing that consumers of a row use.
        rows = [
            tuple(_Piece(self.directions, int(canary), layer, height, sent) for layer, sent in enumerate(cohort.sent))
            for canary in present
        ]
        others = Cohort.of(cohort.layout, cohort.sent, tuple(cast(Row, row) for row in rows))
        return replace(
            contributions,
            cohort=replace(
                cohort,
                rows=(*cohort.rows, *others.rows),
                norms=np.concatenate([cohort.norms, others.norms]),
                factors=np.concatenate([cohort.factors, others.factors]),
            ),
            examples=(*contributions.examples, *repeat(float(MAX_EXAMPLES), len(present))),
            asked=contributions.asked + len(self),
            expected=contributions.expected + len(self) / 2,
        )

    def scored(self, given: Contributions, models: Sequence[Row], bound: float) -> Self:
        """Return these canaries with the evidence of one release added to the scores.

        Args:
            given: input of the mechanism, from `joined`.
            models: the one model released.
            bound: C.
        """
        if not len(self):
            return self
        (model,), sent = models, given.cohort.sent
        moved = tuple(now.astype(np.float64) - then for now, then in zip(model, sent, strict=True))
        return self.seen(moved, bound / given.expected, given.server_round)

    def seen(self, moved: Row, share: float, server_round: int) -> Self:
        """Return these canaries with the evidence of one model change added to the scores.

        Args:
            moved: change of the model by the release, p numbers in flat arrays.
            share: distance that one canary moves the model.
            server_round: counted from 1.
        """
        size = sum(piece.size for piece in moved)
        unit = sign_in(server_round) / (share * math.sqrt(size))
        found = unit * self.along(evened(moved))
        return replace(self, scores=self.scores + found, rounds=self.rounds + 1, size=size)

    def along(self, row: Row) -> NDArray[np.float64]:
        """Return the inner product of a vector with the signs of every canary, shape (m,).

        Args:
            row: p numbers, in flat arrays.
        """
        places = {span: number for number, span in enumerate(spans([piece.size for piece in row]))}
        found = np.zeros((len(places), len(self)))

        def measure(span: Span, _: None) -> None:
            numbers = span.of(row).astype(np.float32)
            for canary in range(len(self)):
                signs = self.directions.signs(canary, span.layer, span.start, span.stop)
                found[places[span], canary] = signs @ numbers

        for_each_span(list(places), measure, lambda: None, cost=len(self))
        return found.sum(axis=0)

    @property
    def guesses(self) -> int:
        """Return the number of coins that an audit guesses: even, and computed from m alone."""
        return min(len(self) - len(self) % 2, 2 * round(GUESSES_PER_ROOT * math.sqrt(len(self)) / 2))

    def facts(self) -> dict[str, object]:
        """Return the content of `canaries.json`.

        Its only dependence on clients is through the releases.
        """
        return {
            "canaries": len(self),
            "guesses": self.guesses,
            "drawn": "from privacy.noise-seed" if self.seeded else "from the operating system's entropy",
            "rounds": self.rounds,
            "parameters": self.size,
            "coins": [int(coin) for coin in self.coins],
            "scores": [float(score) for score in self.scores],
        }

    def state_dict(self) -> State:
        """Return the state of the canaries, including their secrets; empty without canaries."""
        if not len(self):
            return {}
        key = np.frombuffer(self.directions.key, np.uint8)
        seen = {"scores": self.scores, "rounds": np.array(self.rounds), "size": np.array(self.size)}
        return {"key": key, "coins": self.coins, **seen}

    def restored(self, state: State) -> Self:
        """Return these canaries with a saved state.

        Raises:
            ValueError: the state belongs to other canaries.
        """
        if not state:
            return self
        shapes = state["key"].shape, state["coins"].shape, state["scores"].shape
        if shapes != ((KEY,), self.coins.shape, self.scores.shape) or state["coins"].dtype != bool:
            raise ValueError("the state of other canaries")
        rounds, size = int(state["rounds"]), int(state["size"])
        directions = Directions(state["key"].tobytes())
        return replace(
            self, directions=directions, coins=state["coins"], scores=state["scores"], rounds=rounds, size=size
        )


NO_CANARIES = Canaries.drawn(0)


@dataclass(frozen=True)
class _Piece:
    """One array of a canary's model, computed range by range on access.

    A thousand canaries of a million float32 parameters would need four gigabytes.
    """

    directions: Directions
    canary: int
    layer: int
    height: float
    sent: NDArray

    def __getitem__(self, which: slice) -> NDArray:
        start, stop, _ = which.indices(len(self.sent))
        signs = self.directions.signs(self.canary, self.layer, start, stop)
        signs *= self.height
        return self.sent[which] + signs

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray:
        return np.asarray(self[:], dtype)


def sign_in(server_round: int) -> int:
    """Return the direction of all canaries in a round, 1 or -1: the Thue-Morse sequence.

    Noise that is equal in all rounds, or repeats after a power of two, cancels in the scores. So does much of the
    effect of the canaries on the model.

    Args:
        server_round: counted from 1.
    """
    return -1 if (server_round - 1).bit_count() % 2 else 1


def evened(moved: Row) -> Row:
    """Weight a model change by the inverse of its estimated covariance.

    The covariance is estimated from the change itself.

    Independent noise of one size stays unchanged, up to the error of the estimate. Directions in which clients move the
    model far count less. Arrays with less noise count more. Noise that repeats from block to block cancels.

    Args:
        moved: p numbers in flat arrays.
    """
    power = np.square(np.concatenate(moved)).mean()
    even: list[NDArray] = []
    for piece in moved:
        own = np.square(piece).mean() if piece.size >= MEASURABLE else 0.0
        even.append(piece * (power / own) if own else piece)
    return tuple(np.split(decorrelated(np.concatenate(even)), np.cumsum([piece.size for piece in moved])[:-1]))


def decorrelated(update: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weight blocks of a vector by the inverse of their estimated covariance.

    Args:
        update: p numbers.
    """
    width = 1 << round(math.log2(SLENDERNESS * update.size) / 2)
    count = update.size // width
    if count < 2:
        return update
    blocks = update[: count * width].reshape(count, width)
    gram = blocks @ blocks.T
    weighed = np.linalg.pinv(gram, hermitian=True) @ blocks * (np.trace(gram) / count)
    return np.concatenate([weighed.ravel(), update[count * width :]])
