"""Restriction of the information in error replies of a node."""

import logging
from logging import ERROR, WARNING

from flwr.app import Context, Error, Message

from cloister.core.crash import trace_without_values
from cloister.core.errors import BudgetExhausted, CloisterError, DataError, NodeConfigError
from cloister.core.text import clean
from cloister.flower.messages import CallNext, ErrorCode

logger = logging.getLogger("cloister.client")


def contain_errors(message: Message, context: Context, call_next: CallNext) -> Message:
    """Answer an exception with an error reply that carries no data.

    Messages about keys, names and budgets leave the node. Errors about data contain file names and row counts. Errors
    about the node's configuration quote it, and any other exception may quote an example. Of these only the type
    leaves, and the rest is logged on the node.
    """
    try:
        return call_next(message, context)
    except Exception as error:
        # Text from the server must not add lines to this node's log.
        place = f"run {message.metadata.run_id}, round {clean(message.metadata.group_id)}, node {context.node_id}"
        logged = log_text(error)
        if isinstance(error, BudgetExhausted):
            # An abstention is the purpose of a budget, not a failure.
            logger.log(WARNING, "%s: this client abstains%s", place, logged)
        else:
            trace = "\n".join(f"  {clean(line)}" for line in trace_without_values(error).splitlines())
            logger.log(ERROR, "%s: this client failed%s\n%s", place, logged, trace)
        told = isinstance(error, CloisterError) and not isinstance(error, DataError | NodeConfigError)
        reason = f"{type(error).__name__}: {error if told else 'details are in the log of the node'}"
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def log_text(error: Exception) -> str:
    """Return the text for this node's log: the message of a Cloister error.

    It is empty for other errors, which may quote an example. If the cause is a spent budget, the text is that of the
    cause; the text that leaves is equal for all budgets.
    """
    told = error.__cause__ if isinstance(error.__cause__, BudgetExhausted) else error
    lines = map(clean, str(told).splitlines())
    return f": {'; '.join(lines)}" if isinstance(told, CloisterError) else ""
