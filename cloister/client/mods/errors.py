"""What an error may say when it leaves a node."""

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

    What we say of keys, names and budgets is passed on. What is said of data names files and counts rows, what is said
    of the node's configuration quotes it, and the text of any other exception may quote an example: of those only the
    type leaves, and the rest stays in this node's log.
    """
    try:
        return call_next(message, context)
    except Exception as error:
        # What the server wrote shall write no lines of its own into this node's log.
        place = f"run {message.metadata.run_id}, round {clean(message.metadata.group_id)}, node {context.node_id}"
        logged = log_text(error)
        if isinstance(error, BudgetExhausted):
            # Nothing is broken: to abstain is what a budget is for.
            logger.log(WARNING, "%s: this client abstains%s", place, logged)
        else:
            trace = "\n".join(f"  {clean(line)}" for line in trace_without_values(error).splitlines())
            logger.log(ERROR, "%s: this client failed%s\n%s", place, logged, trace)
        told = isinstance(error, CloisterError) and not isinstance(error, DataError | NodeConfigError)
        reason = f"{type(error).__name__}: {error if told else 'details are in the log of the node'}"
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def log_text(error: Exception) -> str:
    """The text for this node's log: of an error of ours its message; of any other nothing, as it may quote an example.

    Where the cause is a spent budget, the text is that of the cause: what leaves is the same whichever budget it was.
    """
    told = error.__cause__ if isinstance(error.__cause__, BudgetExhausted) else error
    lines = map(clean, str(told).splitlines())
    return f": {'; '.join(lines)}" if isinstance(told, CloisterError) else ""
