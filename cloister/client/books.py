"""A node's own ledger: which releases its data went into, and when that is enough.

The node believes what the server says about the noise; it cannot see it. What it can do is count its own part in what
the server promises, over all runs on its data, and stay away when its own budget is spent.
"""

import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from logging import INFO
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, MessageType, UserConfig
from flwr.clientapp.typing import ClientAppCallable

from cloister.client.data import DATA_PATH
from cloister.client.example_books import Spending, Tally, limits, mechanism_of, training_event
from cloister.client.handlers import run_config
from cloister.client.policy import POLICY, budgets_of
from cloister.core import check
from cloister.core.errors import BudgetExhausted, ConfigError, PrivacyError
from cloister.core.wire import CONFIG, PROMISE, ROUND
from cloister.privacy.books import Books
from cloister.privacy.events import Event, Gaussian, Unaccounted
from cloister.privacy.ledger import Ledger
from cloister.tasks import TASKS

LEDGER_FOLDER = "ledger-dir"
IDENTITY = "data-identity"
BUDGET = "max-epsilon"
EXAMPLE_BUDGET = "max-example-epsilon"
MAX_LEAKAGE = "max-leakage"
DELTA = "target-delta"
KEYS = {DATA_PATH, LEDGER_FOLDER, BUDGET, EXAMPLE_BUDGET, MAX_LEAKAGE, DELTA, IDENTITY, POLICY}
"""A node whose configuration says any of these keeps books on disk."""
logger = logging.getLogger("cloister.client")
DEFAULT_FOLDER = "~/.cloister/ledgers"


def keep_books(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Record what a training reply will go into before it is made; abstain if the node's budget does not allow it.

    A node keeps books if it has data of its own (`data-path`), a policy, or if its configuration says anything about
    books: about itself, as far as the server promises, and about each of its examples, as far as it protects them
    itself. Any other node counts what DP-SGD costs its examples in its state. Scores of a model on its examples carry
    no noise: where there is a budget, none are sent.

    Raises:
        BudgetExhausted: the node abstains; the server sees an error reply that says so.
        PrivacyError: the server's promise cannot be read.
    """
    node, kind = context.node_config, message.metadata.message_type
    if kind not in (MessageType.TRAIN, MessageType.EVALUATE):
        return call_next(message, context)  # nothing leaves
    if kind == MessageType.EVALUATE:
        _refuse_scores(node)
    number = int(message.content.config_records[CONFIG][ROUND])  # type: ignore[arg-type]
    with _place_unnamed(node), ExitStack() as stack:
        planned = list(_planned(message, context))
        try:
            # All or none: what is not made is not to be counted.
            for entry in planned:
                entry.spending.require(entry.events)
            for entry in planned:
                for event in entry.events:
                    stack.enter_context(entry.spending.release(event, number, entry.mechanism, entry.clip))
        except BudgetExhausted as error:
            # How much was spent, with others too, is the node's own affair.
            logger.log(INFO, "abstaining: %s", error)
            raise BudgetExhausted("the budget of this node is spent, or cannot cover this run") from None
        return call_next(message, context)


def keeps_books(node: UserConfig) -> bool:
    """Whether the node has data of its own, or its configuration says anything about books."""
    return bool(KEYS & set(node))


def _refuse_scores(node: UserConfig) -> None:
    """Raises BudgetExhausted if scores, which carry no noise, would leave a node that limits what may leave."""
    numbers = numbers_of(node)
    for key in (BUDGET, EXAMPLE_BUDGET):
        if numbers[key]:
            raise BudgetExhausted(
                f"this node has a budget ({key}), and scores on its examples would leave without noise"
            )


@dataclass(frozen=True)
class _Planned:
    """Releases that a reply is about to make, and where they are counted."""

    spending: Spending
    events: list[Event]
    mechanism: str = ""
    clip: float = 0.0


def _planned(message: Message, context: Context) -> Iterator[_Planned]:
    """The releases of a reply: about the client, as the server promises, and about its examples, as it is done here."""
    node, config = context.node_config, run_config(context)
    scores: list[Event] = [Unaccounted("scores left without noise")]
    training = message.metadata.message_type == MessageType.TRAIN
    numbers = numbers_of(node)
    delta, epsilon = limits(config.privacy, numbers[DELTA], numbers[EXAMPLE_BUDGET])
    own, mechanism, clip = scores, "", 0.0
    if training:
        own, mechanism, clip = [training_event(message, context)], *mechanism_of(message, context)
    if not keeps_books(node):
        if config.privacy.client == "dp-sgd":
            yield _Planned(Tally(context.state, delta, epsilon), own)
        return
    promise = promised(message.content.config_records[CONFIG]) if training else scores
    books = books_of(node, config.task.name, str(message.metadata.run_id))
    of_examples = Books(books.ledger, books.run, "example", delta, epsilon)
    for each in (books, of_examples):
        each.begin(each.run)
    yield _Planned(books, promise, "as the server promised")
    yield _Planned(of_examples, own, mechanism, clip)


@contextmanager
def _place_unnamed(node: UserConfig) -> Iterator[None]:
    """The block, whose errors may leave: how a site names its folders is its own business."""
    try:
        yield
    except PrivacyError as error:
        raise type(error)(str(error).replace(str(_folder(node)), "ledger-dir")) from None


def books_of(node: UserConfig, task: str, run: str) -> Books:
    """The books of the node with this node configuration.

    Raises:
        ConfigError: its budget or its δ is no number.
        LedgerError: its ledger is broken.
        PolicyError: its policy cannot be read.
    """
    TASKS.load(task)  # the name comes from the server, and is to name a file here
    path = _folder(node) / f"{identity_of(node, task)}.jsonl"
    numbers = numbers_of(node)
    return Books(_ledger(path), run, "client", delta=numbers[DELTA], max_epsilon=numbers[BUDGET])


def numbers_of(node: UserConfig) -> dict[str, float]:
    """The node's δ and its budgets, the stricter of what its configuration and its policy say; a budget of 0 is none.

    Raises:
        ConfigError: one is no number in its range.
        PolicyError: the policy cannot be read.
    """
    numbers = {
        BUDGET: node.get(BUDGET, 0.0),
        EXAMPLE_BUDGET: node.get(EXAMPLE_BUDGET, 0.0),
        DELTA: node.get(DELTA, 1e-5),
    }
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{key} = {value!r} in the node configuration must be a number")
    check.positive(**{f"{DELTA} in the node configuration": float(numbers[DELTA])})
    check.non_negative(**{f"{key} in the node configuration": float(numbers[key]) for key in (BUDGET, EXAMPLE_BUDGET)})
    budget, example_budget, delta = budgets_of(node, *(float(value) for value in numbers.values()))
    return {BUDGET: budget, EXAMPLE_BUDGET: example_budget, DELTA: delta}


@lru_cache(maxsize=4096)
def _ledger(path: Path) -> Ledger:
    """One for each file: it reads on from where it was, and need not check the whole chain for every message."""
    return Ledger(path)


def _folder(node: UserConfig) -> Path:
    return Path(str(node.get(LEDGER_FOLDER, DEFAULT_FOLDER))).expanduser().resolve()


def identity_of(node: UserConfig, task: str) -> str:
    """The name of the node's data: as given, or a digest of where it lies, or of the part of a task that it is."""
    if IDENTITY in node:
        if not re.fullmatch(r"[\w.-]+", str(node[IDENTITY])):
            raise ConfigError(f"{IDENTITY} in the node configuration must be letters, digits, '.', '_' and '-'")
        return str(node[IDENTITY])
    # However a path is written, and whatever a server calls the task, it is the same data.
    if DATA_PATH in node:
        path = Path(str(node[DATA_PATH])).expanduser().resolve()
        return f"data-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    place = f"{task} {node.get('partition-id', '')}"
    return f"{task}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


def promised(config: ConfigRecord) -> list[Event]:
    """The releases that a reply will go into, as the server says."""
    multipliers = config.get(PROMISE)
    if multipliers is None:
        return [Unaccounted("the server claims nothing for this round")]
    if (
        not isinstance(multipliers, list)
        or not multipliers
        or not all(isinstance(z, float) and z > 0 for z in multipliers)
    ):
        raise PrivacyError(f"{PROMISE!r} in the server's message must be a list of numbers above 0, and not empty")
    return [Gaussian(float(z)) for z in multipliers]  # type: ignore[arg-type]
