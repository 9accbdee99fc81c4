"""The polling interval of an idle node: against a SuperLink that counts, by a clock that the test turns."""

import inspect
import math

import pytest
from flwr.supernode import start_client_internal

from cloister.deploy.warm import node
from cloister.deploy.warm.supernode import Polling
from cloister.utils.errors import ConfigError


class World:
    """Messages that arrive at given times, and a node that looks for them. Working on one takes `work` seconds.

    The SuperLink holds a look for `held` seconds, unless a message arrives.
    """

    def __init__(self, arrivals, work=0.0, held=0.0, **pauses):
        self.now, self.looks, self.noticed, self.pauses = 0.0, [], [], []
        self.arrivals, self.work, self.held = list(arrivals), work, held
        self.polling = Polling(clock=lambda: self.now, sleep=self.sleep, **pauses)
        self.look = self.polling.looking(self.receive)

    def sleep(self, seconds):
        assert seconds > 0
        self.pauses.append(seconds)
        self.now += seconds

    def receive(self):
        self.looks.append(self.now)
        arrives = self.arrivals[0] if self.arrivals else math.inf
        self.now = min(self.now + self.held, max(self.now, arrives))
        if arrives <= self.now:
            self.noticed.append(self.now - self.arrivals.pop(0))
            return 1
        return None

    def until(self, end):
        """The loop of Flower's SuperNode."""
        while self.now < end:
            if self.look() is None:
                self.polling.pause(3)
                continue
            ready = self.now + self.work
            while self.now < ready:
                self.polling.pause(0.5)
        return self


def test_an_idle_node_asks_every_few_seconds():
    looks = World([]).until(3600).looks
    assert len(looks) < 3600 / 5 + 60  # 50 until the pauses have grown
    assert looks[-1] - looks[-2] == pytest.approx(5.0)


def test_after_a_message_it_asks_ten_times_a_second_again():
    world = World([1000.0]).until(1010)
    (noticed,) = [now for now in world.looks if now >= 1000][:1]
    after = [now for now in world.looks if noticed <= now < noticed + 1]
    assert len(after) >= 9 and world.noticed[0] <= 5


def test_a_message_is_noticed_within_a_tenth_of_the_time_it_was_waited_for():
    for pause in (1, 4, 20, 45):
        world = World([pause * (number + 1) for number in range(30)]).until(31 * pause)
        assert len(world.noticed) == 30 and max(world.noticed) <= max(0.1, 0.1 * 1.2 * pause) + 1e-9


def test_never_later_than_the_slowest_pause_and_never_more_often_than_the_fastest():
    world = World([5000.0], fastest=2.0, slowest=7.0).until(5100)
    gaps = [later - sooner for sooner, later in zip(world.looks, world.looks[1:])]
    assert world.noticed[0] <= 7.0 and max(gaps) == pytest.approx(7.0)
    assert sorted(gaps)[1] == pytest.approx(2.0)  # the first follows on the message at once


def test_its_own_clients_reply_is_noticed_within_a_tenth_of_its_work_however_long_it_was_idle():
    for work, late in ((0.3, 0.04), (2.0, 0.22), (10.0, 0.5)):
        world = World([1000.0], work=work).until(1000)
        while not world.noticed:
            world.until(world.now + 0.01)
        begun = world.looks[-1]
        world.until(begun + work)
        ready = [now for now in world.looks if now > begun]
        assert work <= (ready[0] if ready else world.now) - begun <= work + late


def test_looking_for_its_own_clients_reply_slows_down():
    world = World([0.0], work=60.0).until(60)
    assert len(world.pauses) < 200


def test_where_the_superlink_holds_a_look_no_message_waits_for_the_next_one():
    world = World([3.0, 700.0, 1234.5], held=5.0).until(2000)
    assert max(world.noticed) <= 0.1 and len(world.looks) < 2000 / 5 + 20


def test_the_executor_is_woken_for_each_message_once_it_is_there():
    woken = []
    world = World([1.0, 2.0])
    world.polling.wake = lambda: woken.append(len(world.noticed))
    world.until(10)
    assert woken == [1, 2]


def test_working_long_does_not_count_as_idling():
    world = World([1.0], work=500.0).until(501)
    ready = world.now
    world.until(ready + 3)
    assert len([now for now in world.looks if now >= ready]) >= 5


def test_flowers_supernode_pauses_like_this(monkeypatch):
    """Its loop, as shipped: it looks, and where there is nothing it sleeps by the module's `time`."""
    slept = []

    class Enough(Exception):
        pass

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            raise Enough

    monkeypatch.setattr(start_client_internal, "time", start_client_internal.time)
    monkeypatch.setattr(start_client_internal, "_pull_and_store_message", lambda **_: None)
    monkeypatch.setattr(start_client_internal, "pull_objects", start_client_internal.pull_objects)
    clock = iter([0.0, 1.0, 1.0, 30.0, 30.0, 900.0, 900.0])
    Polling(clock=lambda: next(clock), sleep=sleep).install()
    with pytest.raises(Enough):
        while True:
            if start_client_internal._pull_and_store_message(state=None) is None:
                start_client_internal.time.sleep(3)
    assert slept == [0.1, 3.0, 5.0]
    source = start_client_internal.start_client_internal.__code__
    assert {"_pull_and_store_message", "time"} <= set(source.co_names), "the loop no longer uses these names"


def test_flowers_supernode_soon_asks_again_for_a_part_that_is_on_the_way(monkeypatch):
    """As shipped it would wait a second, and parts arrive some milliseconds after a SuperLink told of the message."""
    shipped = start_client_internal.pull_objects
    names = start_client_internal._pull_and_store_message.__code__.co_names
    for name in ("_pull_and_store_message", "time", "pull_objects"):
        monkeypatch.setattr(start_client_internal, name, getattr(start_client_internal, name))
    Polling().install()
    assert "pull_objects" in names
    assert inspect.signature(shipped).parameters["initial_backoff"].default == 1
    assert inspect.signature(start_client_internal.pull_objects).parameters["initial_backoff"].default == 0.05


def test_pauses_that_are_none_are_refused():
    for polls in ((0.0, 5.0), (-1.0, 5.0), (6.0, 5.0), (float("nan"), 5.0)):
        with pytest.raises(ConfigError, match="--fastest-poll"):
            node.run_node(["--insecure"], polls=polls)
