"""Partition of a benchmark's examples among simulated clients.

Every partition returns one index array per client, in rising order. So the result depends on the seed only, and no
client receives its examples class by class. Clients share no examples, unless `task.examples-per-client` asks for more
examples than there are.

With `task.group` each group goes to one client as a whole. `natural` keeps the sites of the data instead: there a
person may be at several sites.
"""

import logging
import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cloister.config.run import TaskConfig
from cloister.tasks.base import ClassCounts, Dataset
from cloister.utils import check
from cloister.utils.errors import ConfigError

Indices = NDArray[np.intp]

DRAWS = 100
"""Largest number of draws of `dirichlet`. It fails if each leaves a client without examples."""
EXAMPLES, GROUPS = "training examples", "groups of training examples"
"""Names of the partitioned items in messages."""
SPLIT_SEED = 0
"""Seed of every split of benchmark data: every run of every strategy is scored on the same examples."""
BY_LABEL = ("shards", "dirichlet", "table")
"""Partitions that depend on the classes of examples."""
logger = logging.getLogger("cloister.tasks")
SCARCE = "task.partition = %r asks for %d training examples of class %d, and there are %d: its proportions are used"
WHOLE = re.compile("[0-9]{1,9}")
"""A count in `task.table`. With at most nine digits, sums of counts stay far below the largest integer."""


def deal(
    config: TaskConfig,
    default: str,
    dataset: Dataset,
    clients: int,
    classes: int,
    seed: int,
    published: Mapping[str, ClassCounts] | None = None,
) -> list[Indices]:
    """Partition the training examples, or their groups, by `task.partition`.

    Args:
        config: of the task.
        default: the partition that `task.partition = "auto"` selects; with owners, natural in place of iid.
        dataset: with n training examples, labelled 0 to `classes` - 1; `train.groups` are those of `task.group`.
        clients: number of parts, 1 to n; with `task.examples-per-client`, any number.
        classes: number of classes; 0 if targets are not labels.
        seed: ≥ 0; equal seeds give equal parts.
        published: the task's own tables, by name.

    Returns:
        One array of training indices per client.

    Raises:
        ConfigError: the data cannot satisfy a key, which the message names.
    """
    check.positive(clients=clients)
    check.non_negative(seed=seed)
    labels, groups, rng = dataset.train.y, dataset.train.groups, np.random.default_rng(seed)
    kind: str = config.partition
    if kind == "auto":
        by_owners = default == "iid" and dataset.owners is not None and not config.examples_per_client
        kind = "natural" if by_owners else default
    if not classes and kind in BY_LABEL:
        raise ConfigError(
            f"task.partition = {kind!r} deals by class, and an example of task.name = {config.name!r} has none; use "
            "iid or natural"
        )
    if kind == "natural" and not config.examples_per_client:
        if dataset.owners is None:
            raise ConfigError(
                f"task.partition = 'natural' needs examples with owners, and task.name = {config.name!r} has none; "
                "give task.data-path a folder with the data of each site, or use iid, shards, dirichlet or table"
            )
        return natural(dataset.owners, clients)
    if groups is not None:
        exact = f"task.partition = {kind!r}" if kind not in ("iid", "shards", "dirichlet") else ""
        if config.examples_per_client:
            exact = f"task.examples-per-client = {config.examples_per_client}"
        if exact:
            raise ConfigError(
                f"{exact} deals exact numbers of examples, and task.group = {config.group!r} whole groups; use "
                "task.partition iid, shards, dirichlet or natural, and task.examples-per-client = 0"
            )
        _, places = np.unique(groups, return_inverse=True)
        count = int(places.max(initial=-1)) + 1
        majorities = np.zeros(count, np.intp)  # most frequent class of each group; 0 if targets are not labels
        if classes:
            counts = np.bincount(places * classes + labels, minlength=count * classes)
            majorities = counts.reshape(count, classes).argmax(axis=1)
        parts = _by_labels(config, kind, majorities, clients, rng, GROUPS)
        return [np.flatnonzero(np.isin(places, part)) for part in parts]
    if config.examples_per_client:
        return of_one_size(labels, clients, config, kind, rng)
    if kind == "table":
        _refuse_more_clients_than(len(labels), clients)
        return table(labels, parse_table(config.table, clients, classes), rng)
    if published and kind in published:
        _refuse_more_clients_than(len(labels), clients)
        return table(labels, fitted(kind, published[kind], labels, clients), rng)
    return _by_labels(config, kind, labels, clients, rng)


def _by_labels(
    config: TaskConfig, kind: str, labels: NDArray, clients: int, rng: np.random.Generator, of: str = EXAMPLES
) -> list[Indices]:
    """Partition items with these labels by a method that gives no exact counts."""
    _refuse_more_clients_than(len(labels), clients, of)
    match kind:
        case "iid":
            return iid(labels, clients, rng)
        case "shards":
            return shards(labels, clients, config.shards_per_client, rng, of)
        case "dirichlet":
            return dirichlet(labels, clients, config.alpha, rng, of)
        case unknown:
            raise ConfigError(f"task.partition must be one of iid, shards, dirichlet, natural, table; got {unknown!r}")


def iid(labels: NDArray, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Shuffle the examples and cut them into parts whose sizes differ by at most one.

    Args:
        labels: of n examples, shape (n,); only their number counts.
        clients: number of parts, 1 to n.
        rng: of the shuffle.

    Returns:
        One array of indices per client, in rising order.
    """
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


def shards(
    labels: NDArray, clients: int, shards_per_client: int, rng: np.random.Generator, of: str = EXAMPLES
) -> list[Indices]:
    """Sort examples by label, cut them into shards, and assign shards at random.

    The shards are equal, and each client receives `shards_per_client` of them.

    Args:
        labels: of n examples, shape (n,).
        clients: number of parts, > 0.
        shards_per_client: > 0; with few of them a client has few classes.
        rng: of the assignment.
        of: name of the labelled items in messages.

    Raises:
        ConfigError: there are more shards than examples.

    Source: McMahan et al. (2017), arXiv:1602.05629, §3.
    """
    total = clients * shards_per_client
    if total > len(labels):
        raise ConfigError(
            f"task.shards-per-client = {shards_per_client} for {clients} clients makes {total} shards, but there are "
            f"only {len(labels)} {of}; use at most {len(labels) // clients}"
        )
    pieces = np.array_split(np.argsort(labels, kind="stable"), total)
    hands = rng.permutation(total).reshape(clients, shards_per_client)
    return [np.sort(np.concatenate([pieces[piece] for piece in hand])) for hand in hands]


def of_one_size(
    labels: NDArray, clients: int, config: TaskConfig, kind: str, rng: np.random.Generator
) -> list[Indices]:
    """Partition into clients of exactly `task.examples-per-client` examples.

    The method is `iid` or `shards`. If the examples are used up, all are shuffled and partitioned again for the next
    clients. If a pass does not divide evenly, a random remainder stays unused in that pass.

    Args:
        labels: of n examples, shape (n,).
        clients: number of parts, any number.
        config: of the task, with the size of a part and the number of shards.
        kind: `iid` or `shards`.
        rng: of the passes.

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


def dirichlet(
    labels: NDArray, clients: int, alpha: float, rng: np.random.Generator, of: str = EXAMPLES
) -> list[Indices]:
    """Split each class among the clients by Dirichlet(`alpha`) proportions.

    The split is drawn again until every client has an example.

    Args:
        labels: of n examples, shape (n,).
        clients: number of parts, 1 to n.
        alpha: α > 0 of the symmetric distribution; the smaller, the fewer classes a client has.
        rng: of the draws.
        of: name of the labelled items in messages.

    Raises:
        ConfigError: each of `DRAWS` draws left a client without examples.

    Source: Hsu et al. (2019), arXiv:1909.06335.
    """
    for _ in range(DRAWS):
        hands = []
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            ends = np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * members.size
            hands.append(np.split(members, ends.astype(np.intp)))
        parts = [np.sort(np.concatenate(hand)) for hand in zip(*hands, strict=True)]
        if all(part.size for part in parts):
            return parts
    raise ConfigError(
        f"task.alpha = {alpha} leaves one of {clients} clients without any of the {len(labels)} {of} in "
        f"each of {DRAWS} draws; raise task.alpha or use fewer clients"
    )


def natural(owners: NDArray, clients: int) -> list[Indices]:
    """Assign the examples of the i-th owner to client i; further owners are left out.

    Args:
        owners: of n examples, shape (n,).
        clients: number of parts, at most the number of owners.

    Raises:
        ConfigError: there are more clients than owners.
    """
    sites = np.unique(owners)
    if clients > sites.size:
        raise ConfigError(
            f"task.partition = 'natural' has {sites.size} owners for {clients} clients; use at most {sites.size} "
            "clients or another task.partition"
        )
    return [np.flatnonzero(owners == site) for site in sites[:clients]]


def numbered(owners: NDArray, rng: np.random.Generator) -> NDArray[np.intp]:
    """Number owners from 0 in random order.

    So the first few are a fair sample of all.

    Args:
        owners: of n examples, shape (n,).
        rng: of the order.

    Returns:
        The number of each example's owner, shape (n,).
    """
    names, places = np.unique(owners, return_inverse=True)
    return rng.permutation(len(names))[places]


def table(labels: NDArray, counts: NDArray[np.intp], rng: np.random.Generator) -> list[Indices]:
    """Draw exactly `counts[i, c]` examples of class c for client i.

    Draws are without replacement. Further examples stay unused.

    Args:
        labels: of n examples, shape (n,), from 0 on.
        counts: shape (clients, classes).
        rng: of the draws.

    Raises:
        ConfigError: a class has fewer examples than the table asks for.
    """
    hands = []
    for label, column in enumerate(counts.T):
        members, asked = rng.permutation(np.flatnonzero(labels == label)), int(column.sum())
        if asked > members.size:
            raise ConfigError(
                f"task.table asks for {asked} training examples of class {label}; the task has {members.size}"
            )
        hands.append(np.split(members[:asked], np.cumsum(column)[:-1]))
    return [np.sort(np.concatenate(parts)) for parts in zip(*hands, strict=True)]


def parse_table(text: str, clients: int, classes: int) -> NDArray[np.intp]:
    """Parse the table of counts in `task.table`.

    A `;` separates the rows of the clients, and a `,` the counts of the classes.

    Args:
        text: of the table.
        clients: required number of rows.
        classes: required number of counts in each row.

    Returns:
        Counts of shape (clients, classes); every client has at least one example.

    Raises:
        ConfigError: naming the row and its fault.
    """
    if not text.strip():
        raise ConfigError("task.table is empty; task.partition = 'table' needs a row per client, such as '10,20;30,0'")
    rows = text.split(";")
    if len(rows) != clients:
        raise ConfigError(f"task.table has {len(rows)} rows; the federation has {clients} clients, one row each")
    counts = []
    for number, row in enumerate(rows, 1):
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) != classes:
            raise ConfigError(f"task.table row {number} has {len(cells)} numbers; the task has {classes} classes")
        if wrong := [cell for cell in cells if not WHOLE.fullmatch(cell)]:
            raise ConfigError(
                f"task.table row {number} holds {wrong[0]!r}; a count is a whole number from 0 to 999999999"
            )
        counts.append([int(cell) for cell in cells])
        if not any(counts[-1]):
            raise ConfigError(f"task.table row {number} is all zeros; every client needs at least one example")
    return np.array(counts, dtype=np.intp)


def fitted(name: str, rows: ClassCounts, labels: NDArray, clients: int) -> NDArray[np.intp]:
    """Return a published table, scaled down for classes with too few examples.

    Such a class keeps the proportions of the table.

    Args:
        name: of the table.
        rows: the published counts.
        labels: of n examples, shape (n,), from 0 on.
        clients: required number of rows.

    Returns:
        Counts of shape (clients, classes).

    Raises:
        ConfigError: the numbers of clients and rows differ, or a client would have no example.
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
            # By largest remainders.
            exact = counts[:, label] * (there[label] / asked)
            shares = np.floor(exact).astype(np.intp)
            shares[np.argsort(shares - exact, kind="stable")[: there[label] - shares.sum()]] += 1
            counts[:, label] = shares
    if not counts.sum(axis=1).all():
        raise ConfigError(f"task.partition = {name!r} leaves a client without any of {len(labels)} training examples")
    return counts


def holdout(
    labels: NDArray, fraction: float, rng: np.random.Generator, groups: NDArray | None = None
) -> tuple[Indices, Indices]:
    """Split one client's examples into train and test, class by class.

    Args:
        labels: of the client's examples, shape (n,).
        fraction: share of each class that is held out, in [0, 1), rounded to whole examples or groups.
        rng: of the selection.
        groups: shape (n,). All examples of a group go to one side, and the first one decides its class.

    Returns:
        Indices (train, test), together all n. Every class keeps an example in train, so a class of one example is never
        tested on. The test part may be empty.
    """
    if groups is not None:
        _, first, places = np.unique(groups, return_index=True, return_inverse=True)
        parts = holdout(labels[first], fraction, rng)
        train, test = (np.flatnonzero(np.isin(places.ravel(), part)) for part in parts)
        return train, test
    held_out = [np.empty(0, dtype=np.intp)]
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        held_out.append(rng.permutation(members)[: min(round(fraction * members.size), members.size - 1)])
    held = np.zeros(len(labels), dtype=bool)
    held[np.concatenate(held_out)] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def _refuse_more_clients_than(count: int, clients: int, of: str = EXAMPLES) -> None:
    if clients > count:
        raise ConfigError(f"{clients} clients cannot share {count} {of}; use at most {count} clients")
