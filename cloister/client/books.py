"""A node's own ledger: which releases its data went into, and when that is enough.

The node believes what the server says about the noise; it cannot see it. What it can do is count its own part in what
the server promises, over all runs on its data, and stay away when its own budget is spent.
"""

import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from logging import INFO
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, MessageType, UserConfig
from flwr.clientapp.typing import ClientAppCallable

from cloister.client.data import DATA_PATH
from cloister.client.handlers import run_config
from cloister.core.errors import BudgetExhausted, ConfigError, PrivacyError
from cloister.core.wire import CONFIG, PROMISE, ROUND
from cloister.privacy.books import Books
from cloister.privacy.events import Event, Gaussian, Unaccounted
from cloister.privacy.ledger import Ledger
from cloister.tasks import TASKS

LEDGER_FOLDER = "ledger-dir"
IDENTITY = "data-identity"
BUDGET = "max-epsilon"
MAX_LEAKAGE = "max-leakage"
DELTA = "target-delta"
logger = logging.getLogger("cloister.client")
DEFAULT_FOLDER = "~/.cloister/ledgers"


def keep_books(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Record what a training reply will go into before it is made; abstain if the node's budget does not allow it.

    A node keeps books if it has data of its own (`data-path`) or if its configuration says anything about books. Scores
    of a model on its examples carry no noise: a node with a budget sends none.

    Raises:
        BudgetExhausted: the node abstains; the server sees an error reply that says so.
        PrivacyError: the server's promise cannot be read.
    """
    node, kind = context.node_config, message.metadata.message_type
    if not keeps_books(node):
        return call_next(message, context)
    if kind not in (MessageType.TRAIN, MessageType.EVALUATE):
        return call_next(message, context)  # nothing leaves
    if kind == MessageType.EVALUATE and node.get(BUDGET):
        raise BudgetExhausted(
            f"this node has a budget ({BUDGET}), and scores on its examples would leave without noise"
        )
    config = message.content.config_records[CONFIG]
    events = promised(config) if kind == MessageType.TRAIN else [Unaccounted("scores left without noise")]
    with _place_unnamed(node), ExitStack() as stack:
        books = books_of(node, run_config(context).task.name, str(message.metadata.run_id))
        books.begin(books.run)
        try:
            books.require(events)
            for event in events:
                stack.enter_context(books.release(event, int(config[ROUND])))  # type: ignore[arg-type]
        except BudgetExhausted as error:
            # How much was spent, with others too, is the node's own affair.
            logger.log(INFO, "abstaining: %s", error)
            raise BudgetExhausted("the budget of this node is spent, or cannot cover this run") from None
        return call_next(message, context)


def keeps_books(node: UserConfig) -> bool:
    """Whether the node has data of its own, or its configuration says anything about books."""
    return bool({DATA_PATH, LEDGER_FOLDER, BUDGET, MAX_LEAKAGE, DELTA, IDENTITY} & set(node))


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
    TASKS.load(task)  # the name comes from the server, and is to name a file here
    path = _folder(node) / f"{identity_of(node, task)}.jsonl"
    numbers = {BUDGET: node.get(BUDGET, 0.0), DELTA: node.get(DELTA, 1e-5)}
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{key} = {value!r} in the node configuration must be a number")
    return Books(_ledger(path), run, "client", delta=float(numbers[DELTA]), max_epsilon=float(numbers[BUDGET]))


@lru_cache(maxsize=4096)
def _ledger(path: Path) -> Ledger:
    """One for each file: it reads on from where it was, and need not check the whole chain for every message."""
    return Ledger(path)


def _folder(node: UserConfig) -> Path:
    return Path(str(node.get(LEDGER_FOLDER, DEFAULT_FOLDER))).expanduser().resolve()


def identity_of(node: UserConfig, task: str) -> str:
    """The name of the node's data: as given, or the task with a digest of where the data lies."""
    if IDENTITY in node:
        if not re.fullmatch(r"[\w.-]+", str(node[IDENTITY])):
            raise ConfigError(f"{IDENTITY} in the node configuration must be letters, digits, '.', '_' and '-'")
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
