"""What stands between a handler and the network. The first mod of the list is outermost: it sees the reply last."""

import logging
from logging import ERROR

from flwr.app import Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode

from cloister.client.handlers import run_config
from cloister.core.config import RunConfig
from cloister.core.errors import CloisterError, DataError, PrivacyError
from cloister.core.wire import ARRAYS, CHOSEN, EXAMPLES, METRICS

logger = logging.getLogger("cloister.client")


def contain_errors(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer an exception with an error reply that carries no data.

    What we say of keys, names and budgets is passed on. What is said of data names files and counts rows, and the text
    of any other exception may quote an example: of those only the type leaves, and the rest stays in this node's log.
    """
    try:
        return call_next(message, context)
    except Exception as error:
        place = f"run {message.metadata.run_id}, round {message.metadata.group_id}, node {context.node_id}"
        logger.log(ERROR, "%s: this client failed", place, exc_info=error)
        told = isinstance(error, CloisterError) and not isinstance(error, DataError)
        reason = f"{type(error).__name__}: {error if told else 'details are in the log of the node'}"
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def only_what_is_agreed(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Drop from a reply what this run has no use for; refuse to send what cannot be classified.

    Under a privacy mechanism counts and metrics stay here: they would leave without noise. They leave only where
    `evaluation.federated` is switched on by name, and then the run's report lists them.

    Raises:
        PrivacyError: the message type is none that this mod knows.
    """
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    config = run_config(context)
    kind = message.metadata.message_type
    if kind == MessageType.TRAIN:
        content = RecordDict({ARRAYS: reply.content.array_records[ARRAYS], METRICS: _agreed(reply, config)})
    elif kind == MessageType.EVALUATE and config.evaluates_on_clients:
        content = RecordDict({METRICS: reply.content.metric_records[METRICS]})
    elif kind == MessageType.QUERY:
        content = RecordDict()
    else:
        raise PrivacyError(f"a reply to a {kind!r} message may not leave this node in this run")
    return Message(content, reply_to=message)


def _agreed(reply: Message, config: RunConfig) -> MetricRecord:
    """The metrics of a training reply that this run asks for: all, the example count alone, or none."""
    metrics = reply.content.metric_records[METRICS]
    if not config.is_private:
        return MetricRecord({name: value for name, value in metrics.items() if name != CHOSEN})
    return MetricRecord({EXAMPLES: metrics[EXAMPLES]}) if config.weights_by_examples else MetricRecord()
