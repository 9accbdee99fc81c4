"""Nodes write every refusal and failure to their logs; thousands of them would take longer than the messages."""

import logging

import pytest
from quick_runs import quick_runs  # noqa: F401


@pytest.fixture(autouse=True)
def quiet_nodes():
    logger = logging.getLogger("cloister.client")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)
