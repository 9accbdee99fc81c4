"""A node's own ledger: which releases its data went into, and when that is enough.

The node believes what the server says about the noise; it cannot see it. What it can do is count its own part in what
the server promises, over all runs on its data, and stay away when its own budget is spent.
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from logging import INFO
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, MessageType, UserConfig
from flwr.clientapp.typing import ClientAppCallable

from cloister.client.data import DATA_PATH
from cloister.client.example_books import Spending, Tally, limits, training_event
from cloister.client.handlers import run_config
from cloister.core import check
from cloister.core.errors import BudgetExhausted, ConfigError, PrivacyError
from cloister.core.wire import CONFIG, PROMISE, ROUND
from cloister.privacy.books import Books
from cloister.privacy.events import Event, Gaussian, Unaccounted
from cloister.privacy.ledger import Ledger

LEDGER_FOLDER = "ledger-dir"
IDENTITY = "data-identity"
BUDGET = "max-epsilon"
EXAMPLE_BUDGET = "max-example-epsilon"
DELTA = "target-delta"
KEYS = {DATA_PATH, LEDGER_FOLDER, BUDGET, EXAMPLE_BUDGET, DELTA, IDENTITY}
"""A node whose configuration says any of these keeps books on disk."""
logger = logging.getLogger("cloister.client")
DEFAULT_FOLDER = "~/.cloister/ledgers"


def keep_books(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Record what a training reply will go into before it is made; abstain if the node's budget does not allow it.

    A node keeps books if it has data of its own (`data-path`) or if its configuration says anything about books: about
    itself, as far as the server promises, and about each of its examples, as far as it protects them itself. Any other
    node counts what DP-SGD costs its examples in its state. Scores of a model on its examples carry no noise: where
    there is a budget, none are sent.

    Raises:
        BudgetExhausted: the node abstains; the server sees an error reply that says so.
        PrivacyError: the server's promise cannot be read.
    """
    node, kind = context.node_config, message.metadata.message_type
    if kind == MessageType.EVALUATE:
        _refuse_scores(context)
    if kind != MessageType.TRAIN:
        return call_next(message, context)
    number = int(message.content.config_records[CONFIG][ROUND])  # type: ignore[arg-type]
    with _place_unnamed(node), ExitStack() as stack:
        planned = list(_planned(message, context))
        try:
            # All or none: what is not made is not to be counted.
            for spending, events in planned:
                spending.require(events)
            for spending, events in planned:
                for event in events:
                    stack.enter_context(spending.release(event, number))
        except BudgetExhausted as error:
            # How much was spent, with others too, is the node's own affair.
            logger.log(INFO, "abstaining: %s", error)
            raise BudgetExhausted("the budget of this node is spent, or cannot cover this run") from None
        return call_next(message, context)


def _refuse_scores(context: Context) -> None:
    """Raises BudgetExhausted if scores, which carry no noise, would leave where something limits what may leave."""
    node, privacy = context.node_config, run_config(context).privacy
    for key in (BUDGET, EXAMPLE_BUDGET):
        if node.get(key):
            raise BudgetExhausted(
                f"this node has a budget ({key}), and scores on its examples would leave without noise"
            )
    if privacy.client_max_epsilon:
        raise BudgetExhausted(
            f"privacy.client-max-epsilon = {privacy.client_max_epsilon:g} cannot cover scores on a client's examples, "
            "which would leave without noise"
        )


def _planned(message: Message, context: Context) -> Iterator[tuple[Spending, list[Event]]]:
    """Where the releases of a training reply are counted, and which they are: about the client, about an example."""
    node, config = context.node_config, run_config(context)
    delta, own = _numbers_of(node)[DELTA], _numbers_of(node)[EXAMPLE_BUDGET]
    delta, epsilon = limits(config.privacy, delta, own)
    if not KEYS & set(node):
        if config.privacy.client == "dp-sgd":
            yield Tally(context.state, delta, epsilon), [training_event(message, context)]
        return
    books = books_of(node, config.task.name, str(message.metadata.run_id))
    of_examples = Books(books.ledger, books.run, "example", delta, epsilon)
    for each in (books, of_examples):
        each.begin(each.run)
    yield books, promised(message.content.config_records[CONFIG])
    yield of_examples, [training_event(message, context)]


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
    """
    path = _folder(node) / f"{identity_of(node, task)}.jsonl"
    numbers = _numbers_of(node)
    return Books(Ledger(path), run, "client", delta=numbers[DELTA], max_epsilon=numbers[BUDGET])


def _numbers_of(node: UserConfig) -> dict[str, float]:
    """The node's δ and its budgets.

    Raises:
        ConfigError: one is no number in its range.
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
    return {key: float(value) for key, value in numbers.items()}


def _folder(node: UserConfig) -> Path:
    return Path(str(node.get(LEDGER_FOLDER, DEFAULT_FOLDER))).expanduser().resolve()


def identity_of(node: UserConfig, task: str) -> str:
    """The name of the node's data: as given, or the task with a digest of where the data lies."""
    if IDENTITY in node:
        return str(node[IDENTITY])
    # However a path is written, it is the same data.
    path = Path(str(node[DATA_PATH])).expanduser().resolve() if DATA_PATH in node else ""
    place = f"{path} {node.get('partition-id', '')}"
    return f"{task}-{hashlib.sha256(f'{task} {place}'.encode()).hexdigest()[:12]}"


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
