"""DP-SGD on examples that lie in one place: no federation, one trainer that everybody trusts."""

from collections.abc import Iterator

from numpy.typing import NDArray

from cloister.core import check
from cloister.privacy.dpsgd import batches
from cloister.privacy.dpsgd.step import DpSgd, StepCounts


def train(
    dp_sgd: DpSgd, x: NDArray, y: NDArray, *, steps: int, sampling: str = "poisson", seed: int | None = None
) -> Iterator[StepCounts]:
    """Take private steps on batches of these examples, and give what each one counted, so that a caller can look on.

    Nothing happens until the steps are asked for: write `for counts in train(...)`.

    Args:
        dp_sgd: holds the model, and says how large a batch is expected to be: B.
        x, y: n ≥ B examples.
        steps: how many to take; an accountant is told of as many Gaussian events, drawn by
            `Sampling("bounded-poisson", B/n)`.
        sampling: `poisson`: each example takes part with probability B/n. `shuffle`: equal parts of a random order, for
            comparison; no amplification may be claimed for it.
        seed: of the batches, for tests; the operating system by default.

    Raises:
        ConfigError: the sampling is unknown, or there are fewer examples than a batch is expected to have.
    """
    check.one_of(("poisson", "shuffle"), sampling=sampling)
    if sampling == "poisson":
        drawn = batches.poisson(len(x), dp_sgd.batch_size / len(x), steps, seed)
    else:
        drawn = batches.shuffle(len(x), dp_sgd.batch_size, steps, seed)
    return (dp_sgd.step(x[batch], y[batch]) for batch in drawn)
