"""Dealing the examples of a benchmark to simulated clients.

Every way to deal returns one index array per client. No example goes to two clients, unless clients of a given size
need more than there are; and each array is in rising order, so that the deal depends on the seed alone and no client
receives its examples class by class.
"""

import logging
import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cloister.config.run import TaskConfig
from cloister.core import check
from cloister.core.errors import ConfigError
from cloister.tasks.base import ClassCounts, Dataset

Indices = NDArray[np.intp]

DRAWS = 100
"""How often `dirichlet` draws before it gives up on reaching every client."""
BY_LABEL = ("shards", "dirichlet", "table")
"""Ways to deal that look at the classes of examples."""
logger = logging.getLogger("cloister.tasks")
SCARCE = "task.partition = %r asks for %d training examples of class %d, and there are %d: its proportions are used"
WHOLE = re.compile("[0-9]{1,9}")
"""A count in `task.table`: nine digits, so that sums of counts stay far from the largest integer."""


def deal(
    config: TaskConfig,
    default: str,
    dataset: Dataset,
    clients: int,
    classes: int,
    seed: int,
    published: Mapping[str, ClassCounts] | None = None,
) -> list[Indices]:
    """Deal the training examples as `task.partition` says.

    Args:
        config: of the task.
        default: what `task.partition = "auto"` means.
        dataset: with n training examples, labelled 0 to `classes` - 1.
        clients: how many parts to make, 1 to n, or any number where `task.examples-per-client` says how large.
        classes: number of classes; 0 where targets are no labels.
        seed: ≥ 0; the same seed deals the same parts.
        published: the task's own tables, by name.

    Returns:
        One array of training indices per client.

    Raises:
        ConfigError: naming the key that asks for what the data cannot give.
    """
    check.positive(clients=clients)
    check.non_negative(seed=seed)
    labels, rng = dataset.train.y, np.random.default_rng(seed)
    kind = default if config.partition == "auto" else config.partition
    if not classes and kind in BY_LABEL:
        raise ConfigError(
            f"task.partition = {kind!r} deals by class, and task.name = {config.name!r} has none; use iid or natural"
        )
    if config.examples_per_client:
        return of_one_size(labels, clients, config, kind, rng)
    _refuse_more_clients_than(len(labels), clients)
    match kind:
        case "iid":
            return iid(labels, clients, rng)
        case "shards":
            return shards(labels, clients, config.shards_per_client, rng)
        case "dirichlet":
            return dirichlet(labels, clients, config.alpha, rng)
        case "natural":
            return natural(_owners(dataset, config.name), clients)
        case "table":
            return table(labels, parse_table(config.table, clients, classes), rng)
        case name if published and name in published:
            return table(labels, fitted(name, published[name], labels, clients), rng)
        case unknown:
            raise ConfigError(f"task.partition must be one of iid, shards, dirichlet, natural, table; got {unknown!r}")


def iid(labels: NDArray, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Shuffle the examples and cut them into parts whose sizes differ by at most one.

    Args:
        labels: of n examples, shape (n,); only their number counts.
        clients: how many parts to make, 1 to n.
        rng: of the shuffle.

    Returns:
        One array of indices per client, in rising order.
    """
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


def shards(labels: NDArray, clients: int, shards_per_client: int, rng: np.random.Generator) -> list[Indices]:
    """Sort by label, cut into equal shards, deal `shards_per_client` of them to each client at random.

    Args:
        labels: of n examples, shape (n,).
        clients: how many parts to make, > 0.
        shards_per_client: > 0; with few of them a client has few classes.
        rng: of the deal.

    Raises:
        ConfigError: there are more shards than examples.

    Source: McMahan et al. (2017), arXiv:1602.05629, §3.
    """
    total = clients * shards_per_client
    if total > len(labels):
        raise ConfigError(
            f"task.shards-per-client = {shards_per_client} for {clients} clients makes {total} shards, but there are "
            f"only {len(labels)} training examples; use at most {len(labels) // clients}"
        )
    pieces = np.array_split(np.argsort(labels, kind="stable"), total)
    hands = rng.permutation(total).reshape(clients, shards_per_client)
    return [np.sort(np.concatenate([pieces[piece] for piece in hand])) for hand in hands]


def of_one_size(
    labels: NDArray, clients: int, config: TaskConfig, kind: str, rng: np.random.Generator
) -> list[Indices]:
    """Clients of exactly `task.examples-per-client` examples, by `iid` or `shards`.

    When the examples are used up they are all dealt again, in another order, to the clients that follow; what is left
    of a deal that does not come out even, at random, sits out of it.

    Args:
        labels: of n examples, shape (n,).
        clients: how many parts to make, any number.
        config: of the task, with the size of a part and the number of shards.
        kind: `iid` or `shards`.
        rng: of the deals.

    Raises:
        ConfigError: it is another kind of partition, or there are fewer examples, or shards would not be whole.
    """
    size = config.examples_per_client
    if kind not in ("iid", "shards"):
        raise ConfigError(f"task.examples-per-client = {size} goes with iid and shards, not with {kind!r}")
    if size > len(labels):
        raise ConfigError(f"task.examples-per-client = {size} must be at most the {len(labels)} training examples")
    if kind == "shards" and size % config.shards_per_client:
        raise ConfigError(
            f"task.examples-per-client = {size} must be a multiple of task.shards-per-client = "
            f"{config.shards_per_client}"
        )
    parts: list[Indices] = []
    while len(parts) < clients:
        hands = len(labels) // size
        dealt = rng.permutation(len(labels))[: hands * size]
        own = (
            iid(labels[dealt], hands, rng)
            if kind == "iid"
            else shards(labels[dealt], hands, config.shards_per_client, rng)
        )
        parts += [np.sort(dealt[part]) for part in own]
    return parts[:clients]


def dirichlet(labels: NDArray, clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    """Split each class by proportions drawn from a symmetric Dirichlet(`alpha`), until every client has an example.

    Args:
        labels: of n examples, shape (n,).
        clients: how many parts to make, 1 to n.
        alpha: α > 0; the smaller, the fewer classes a client has.
        rng: of the draws.

    Raises:
        ConfigError: `DRAWS` draws left a client without examples.

    Source: Hsu et al. (2019), arXiv:1909.06335.
    """
    for _ in range(DRAWS):
        parts = _dirichlet_once(labels, clients, alpha, rng)
        if all(part.size for part in parts):
            return parts
    raise ConfigError(
        f"task.alpha = {alpha} leaves one of {clients} clients without any of the {len(labels)} training examples in "
        f"each of {DRAWS} draws; raise task.alpha or use fewer clients"
    )


def natural(groups: NDArray, clients: int) -> list[Indices]:
    """Give client i what the i-th owner has; owners after the last client are left out.

    Args:
        groups: the owner of each of n examples, shape (n,).
        clients: how many parts to make, at most as many as there are owners.

    Raises:
        ConfigError: there are more clients than owners.
    """
    owners = np.unique(groups)
    if clients > owners.size:
        raise ConfigError(
            f"task.partition = 'natural' has {owners.size} owners for {clients} clients; use at most {owners.size} "
            "clients or another task.partition"
        )
    return [np.flatnonzero(groups == owner) for owner in owners[:clients]]


def numbered(owners: NDArray, rng: np.random.Generator) -> NDArray[np.intp]:
    """Number owners of any name from 0 on, in random order: the first few of them are a fair sample of all.

    Args:
        owners: of n examples, shape (n,).
        rng: of the order.

    Returns:
        The number of each example's owner, shape (n,).
    """
    names, places = np.unique(owners, return_inverse=True)
    return rng.permutation(len(names))[places]


def table(labels: NDArray, counts: NDArray[np.intp], rng: np.random.Generator) -> list[Indices]:
    """Draw exactly `counts[i, c]` examples of class c for client i, without replacement; the rest stays unused.

    Args:
        labels: of n examples, shape (n,), from 0 on.
        counts: shape (clients, classes).
        rng: of the draws.

    Raises:
        ConfigError: a class has fewer examples than the table asks for.
    """
    hands = [_draw(labels, label, column, rng) for label, column in enumerate(counts.T)]
    return [np.sort(np.concatenate(parts)) for parts in zip(*hands, strict=True)]


def parse_table(text: str, clients: int, classes: int) -> NDArray[np.intp]:
    """Read `task.table`: a row per client, set apart by `;`, and in it a count per class, set apart by `,`.

    Args:
        text: of the table.
        clients: how many rows it must have.
        classes: how many counts each row must have.

    Returns:
        Counts of shape (clients, classes); every client has at least one example.

    Raises:
        ConfigError: saying which row is wrong and how.
    """
    if not text.strip():
        raise ConfigError("task.table is empty; task.partition = 'table' needs a row per client, such as '10,20;30,0'")
    rows = text.split(";")
    if len(rows) != clients:
        raise ConfigError(f"task.table has {len(rows)} rows; the federation has {clients} clients, one row each")
    return np.array([_parse_row(number, row, classes) for number, row in enumerate(rows, 1)], dtype=np.intp)


def fitted(name: str, rows: ClassCounts, labels: NDArray, clients: int) -> NDArray[np.intp]:
    """A published table for the examples that are there: of a class that has too few of them, its proportions.

    Args:
        name: of the table.
        rows: the published counts.
        labels: of n examples, shape (n,), from 0 on.
        clients: how many rows it must have.

    Returns:
        Counts of shape (clients, classes).

    Raises:
        ConfigError: there are more clients or fewer than rows, or one of them would have no example.
    """
    if len(rows) != clients:
        raise ConfigError(
            f"task.partition = {name!r} has {len(rows)} rows; the federation has {clients} clients, one row each"
        )
    counts = np.array(rows, np.intp)
    there = np.bincount(labels, minlength=counts.shape[1])
    for label, asked in enumerate(counts.sum(axis=0)):
        if asked > there[label]:
            logger.warning(SCARCE, name, asked, label, there[label])
            counts[:, label] = _shares(counts[:, label], int(there[label]))
    if not counts.sum(axis=1).all():
        raise ConfigError(f"task.partition = {name!r} leaves a client without any of {len(labels)} training examples")
    return counts


def holdout(labels: NDArray, fraction: float, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """Split one client's examples into train and test, class by class.

    Args:
        labels: of the client's examples, shape (n,).
        fraction: share of each class that is held out, in [0, 1), rounded to whole examples.
        rng: decides which examples.

    Returns:
        Indices (train, test), together all n. Every class keeps an example in train, so that a class of one example
        is never tested on; test may be empty.
    """
    test = [_held_out(np.flatnonzero(labels == label), fraction, rng) for label in np.unique(labels)]
    held = np.zeros(len(labels), dtype=bool)
    held[np.concatenate([np.empty(0, dtype=np.intp), *test])] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def _refuse_more_clients_than(examples: int, clients: int) -> None:
    if clients > examples:
        raise ConfigError(
            f"{clients} clients cannot share {examples} training examples; use at most {examples} clients"
        )


def _owners(dataset: Dataset, name: str) -> NDArray:
    if dataset.groups is None:
        raise ConfigError(
            f"task.partition = 'natural' needs examples with owners, and task.name = {name!r} has none; "
            "valid are iid, shards, dirichlet, table"
        )
    return dataset.groups


def _dirichlet_once(labels: NDArray, clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    hands = []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * members.size
        hands.append(np.split(members, ends.astype(np.intp)))
    return [np.sort(np.concatenate(parts)) for parts in zip(*hands, strict=True)]


def _draw(labels: NDArray, label: int, counts: NDArray[np.intp], rng: np.random.Generator) -> list[Indices]:
    """Disjoint random draws of `counts[i]` examples of one class."""
    members = rng.permutation(np.flatnonzero(labels == label))
    asked = int(counts.sum())
    if asked > members.size:
        raise ConfigError(
            f"task.table asks for {asked} training examples of class {label}; the task has {members.size}"
        )
    return np.split(members[:asked], np.cumsum(counts)[:-1])


def _shares(column: NDArray[np.intp], total: int) -> NDArray[np.intp]:
    """`total` whole examples in the proportions of a column; what rounding leaves goes to the largest remainders."""
    exact = column * (total / column.sum())
    shares = np.floor(exact).astype(np.intp)
    shares[np.argsort(shares - exact, kind="stable")[: total - shares.sum()]] += 1
    return shares


def _parse_row(number: int, row: str, classes: int) -> Sequence[int]:
    cells = [cell.strip() for cell in row.split(",")]
    if len(cells) != classes:
        raise ConfigError(f"task.table row {number} has {len(cells)} numbers; the task has {classes} classes")
    for cell in cells:
        if not WHOLE.fullmatch(cell):
            raise ConfigError(f"task.table row {number} holds {cell!r}; a count is a whole number from 0 to 999999999")
    counts = [int(cell) for cell in cells]
    if not any(counts):
        raise ConfigError(f"task.table row {number} is all zeros; every client needs at least one example")
    return counts


def _held_out(members: Indices, fraction: float, rng: np.random.Generator) -> Indices:
    count = min(round(fraction * members.size), members.size - 1)
    return rng.permutation(members)[:count]
