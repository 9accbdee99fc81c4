"""A node whose disk fails, or who dies, at any effect on its ledger: no reply leaves that is not recorded there."""

import logging
import random
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from schedules import cheap, memory
from virtual_disk import KILL, POWER, Disk, Killed

from cloister.client import budget, ledgers
from cloister.client.budget import keep_budget
from cloister.client.node import Node
from cloister.client.request import Reply, TrainRequest
from cloister.config.run import parse
from cloister.flower.messages import LOCAL_RUN
from cloister.privacy.accounting.budget import PrivacyBudget, recorded
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.ledger import Ledger
from cloister.utils.errors import PrivacyError

ROUNDS, MAX_EPSILON = 2, 4.0
PROMISED, CONFIG = Gaussian(1.7), parse({"privacy.server": "global-dp"})


class Site:
    """A node with a ledger, asked for one reply after the other by a run that the server resumes again and again."""

    def __init__(self, folder):
        self.folder = folder
        self.folder.mkdir()
        self.disk = Disk(self.folder, random.Random(0))
        self.left = self.trained = 0

    def live(self, faults):
        """One process of the node, from round 1 on."""
        ledgers._ledger.cache_clear()
        said = {"ledger-dir": str(self.folder), "data-identity": "d", "max-epsilon": MAX_EPSILON}
        node = Node.of(Context(LOCAL_RUN, 1, said, RecordDict(), {}))
        with self.disk.watched(faults), suppress(Killed, PrivacyError, OSError):
            for number in range(1, ROUNDS + 1):
                request = TrainRequest(CONFIG, "run", number, 0, (), promise=(PROMISED,))
                with keep_budget(request, node):
                    self.train()
                self.left += 1
        self.disk.reboot()
        self.check()

    def train(self):
        self.trained += 1
        assert len(self.entries) >= self.trained, "trained before it was recorded"
        return Reply()

    @property
    def entries(self):
        return [entry for entry in Ledger(self.folder / "d.jsonl").entries if entry.unit == "client"]

    def check(self):
        assert len(self.entries) >= self.left
        assert PrivacyBudget(Ledger(self.folder / "d.jsonl"), "", max_epsilon=MAX_EPSILON).epsilon() <= MAX_EPSILON


@pytest.fixture
def site(caplog):
    """A function that makes a site, by its name."""
    caplog.set_level(logging.ERROR, "cloister.client")  # which pytest restores
    with cheap(), tempfile.TemporaryDirectory(dir=memory()) as place:
        yield lambda name: Site(Path(place) / str(name))


@pytest.mark.parametrize("fault", [POWER, *(pytest.param(fault, marks=pytest.mark.slow) for fault in (KILL, "ENOSPC"))])
def test_a_node_that_fails_at_any_effect(site, fault):
    # The node does not look at the number of an error: one stands for all.
    whole = site("whole")
    whole.live({})
    assert whole.left == whole.trained == len(whole.entries) == ROUNDS and whole.disk.effects > 10
    for effect in range(1, whole.disk.effects + 1):
        disturbed = site(effect)
        disturbed.live({effect: fault})
        assert disturbed.disk.struck, effect
        for _ in range(2):
            disturbed.live({})
        assert disturbed.trained <= len(disturbed.entries) <= disturbed.trained + 1


def test_a_node_that_trains_first_is_caught(site, monkeypatch):
    @contextmanager
    def late(planned):
        yield
        with recorded(planned):
            pass

    monkeypatch.setattr(budget, "recorded", late)
    with pytest.raises(AssertionError, match="trained before it was recorded"):
        site("broken").live({})
