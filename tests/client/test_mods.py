"""Texts of errors that leave a node."""

import logging

import pytest
from asking import OPEN, context_of, message_of
from support import failures

from cloister.client.mods import contain_errors
from cloister.utils.errors import (
    BudgetExhausted,
    CloisterError,
    ConfigError,
    DataError,
    PolicyError,
    PrivacyError,
)


def contained(error):
    def fail(*_):
        raise error

    message = message_of()
    message.metadata.group_id = "4"
    return contain_errors(message, context_of(OPEN, node_id=7), fail)


def test_an_unexpected_error_leaves_as_its_type_only():
    reply = contained(KeyError("patient 4711"))
    assert reply.error.reason == "KeyError: details are in the log of the node"


def test_our_own_errors_are_told():
    def check(error):
        assert contained(error).error.reason == f"{type(error).__name__}: {error}"

    cases = [CloisterError("x"), ConfigError("no key"), BudgetExhausted("spent"), PolicyError("no"), PrivacyError("no")]
    assert failures(cases, check) == []


def test_what_is_wrong_with_data_stays_with_the_node():
    reply = contained(DataError("37 rows in /wards/north.npz"))
    assert reply.error.reason == "DataError: details are in the log of the node"


def test_an_error_that_was_not_raised_for_us_carries_nothing_of_what_raised_it():
    """Not in what it was raised from, either."""

    class Named(ConfigError):
        def __str__(self):
            return "what we say"

    error = Named("client.batch-size = 3")
    error.__cause__ = ValueError("row 17")
    assert contained(error).error.reason == "Named: what we say"


def test_the_nodes_log_says_where_and_quotes_no_value(caplog):
    with caplog.at_level(logging.ERROR, "cloister.client"):
        contained(KeyError("patient 4711"))
    (record,) = [record for record in caplog.records if record.name == "cloister.client"]
    assert "node 7" in record.getMessage() and "KeyError" in record.getMessage()
    assert "4711" not in record.getMessage() and not record.exc_info
    first, *trace = record.getMessage().splitlines()
    assert first == "run 1, round 4, node 7: this client failed", "nothing is said of it but its type"
    assert trace[-1] == "  KeyError" and record.levelname == "ERROR"


def test_the_nodes_log_says_what_we_say(caplog):
    with caplog.at_level(logging.ERROR, "cloister.client"):
        contained(DataError("own.npz holds inputs that are NaN"))
    assert "own.npz holds inputs that are NaN" in caplog.text


def test_a_node_that_abstains_says_so_in_a_line(caplog):
    with caplog.at_level(logging.WARNING, "cloister.client"):
        reply = contained(BudgetExhausted("the budget of this node is spent"))
    (record,) = [record for record in caplog.records if record.name == "cloister.client"]
    assert record.levelname == "WARNING" and len(record.getMessage().splitlines()) == 1
    assert record.getMessage() == "run 1, round 4, node 7: this client abstains: the budget of this node is spent"
    assert reply.error.reason == "BudgetExhausted: the budget of this node is spent"


def test_the_log_of_a_node_that_abstains_has_the_reason_and_the_server_has_not(caplog):
    abstains = BudgetExhausted("nothing fits")
    abstains.__cause__ = BudgetExhausted("99 % were spent")
    reply = contained(abstains)
    (record,) = [record for record in caplog.records if record.name == "cloister.client"]
    assert record.getMessage().endswith("this client abstains: 99 % were spent")
    assert reply.error.reason == "BudgetExhausted: nothing fits"


def test_a_server_writes_no_lines_of_its_own_into_the_nodes_log(caplog):
    forged = "1\nINFO: this node has trained\x1b[2J"

    def fail(*_):
        raise ConfigError(f"unknown key {forged}")

    message = message_of()
    message.metadata.group_id = forged
    with caplog.at_level(logging.ERROR, "cloister.client"):
        contain_errors(message, context_of(OPEN, node_id=7), fail)
    (record,) = [record for record in caplog.records if record.name == "cloister.client"]
    first, *traced = record.getMessage().splitlines()
    assert "unknown key 1" in first and all(line.startswith("  ") for line in traced)
    assert "\x1b" not in record.getMessage()


def test_a_reply_passes():
    message = message_of()
    assert contain_errors(message, context_of(), lambda *_: message) is message


def test_an_end_of_the_process_is_no_error_reply():
    with pytest.raises(SystemExit):
        contained(SystemExit(1))
