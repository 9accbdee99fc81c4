"""Where a node keeps an attempt between messages: a server that asks out of order, other users, copies, twins."""

import os
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import ClassVar

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from secure_runs import MODEL, SecureRun, app_with, phase_of, random_updates, settings
from secure_twins import both, stripped

from cloister.client import round_state, secure
from cloister.client.node import node_of
from cloister.client.round_state import FolderStore, MemoryStore
from cloister.privacy.mechanisms.distributed.plan import quantize_update
from cloister.secure_aggregation.messages import (
    Cohort,
    MaskedInput,
    Signatures,
    Survivors,
    SurvivorSignature,
    Unmasking,
)
from cloister.secure_aggregation.primitives import combine
from cloister.utils.arrays import Layout, from_record
from cloister.utils.cohort import Cohort as Updates
from cloister.utils.errors import NodeConfigError, ProtocolError
from cloister.utils.wire import CONFIG, SECURE_MESSAGE, SECURE_STEP, SIGN

IN_MEMORY = Path("/dev/shm")
RUN, SECRET = "17", b"what is needed for the next step"
NO_NUMBER = "^what is kept of the last round is no number; this node takes no part in the run$"


@pytest.fixture
def shelf():
    """A folder in memory for each node."""
    if not IN_MEMORY.is_dir():
        pytest.skip("there is no folder in memory")
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        yield Path(folder)


@pytest.fixture(params=["in a folder", "in memory"])
def store(request, shelf):
    return FolderStore(str(shelf)) if request.param == "in a folder" else MemoryStore(RecordDict())


class TestAStore:
    def test_takes_any_round_as_the_first_one_of_a_run(self, store):
        store.begin("16", 3)
        store.begin(RUN, 0)
        with pytest.raises(ProtocolError):
            store.begin(RUN, 0)

    def test_gives_what_it_keeps_once(self, store):
        store.begin(RUN, 3)
        store.keep(RUN, 3, SECRET)
        assert (store.take(RUN, 3), store.take(RUN, 3)) == (SECRET, b"")

    def test_has_nothing_of_a_run_or_a_round_that_it_does_not_know(self, store):
        assert store.take(RUN, 3) == b""
        store.begin(RUN, 3)
        store.keep(RUN, 3, SECRET)
        assert [store.take(RUN, number) for number in (2, 4)] == [b"", b""]
        assert store.take(RUN, 3) == SECRET

    def test_begins_no_round_but_later_ones(self, store):
        store.begin(RUN, 3)
        for number in (3, 2):
            with pytest.raises(ProtocolError, match=f"has begun round {number} of this run before, or a later one"):
                store.begin(RUN, number)
        store.begin(RUN, 4)

    @pytest.mark.parametrize("number", [3, 2, 4])
    def test_has_no_attempt_any_more_once_another_is_asked_for(self, number, store):
        store.begin(RUN, 3)
        store.keep(RUN, 3, SECRET)
        with suppress(ProtocolError):
            store.begin(RUN, number)
        assert [store.take(RUN, one) for one in (2, 3, 4)] == [b"", b"", b""]

    def test_takes_nothing_back_after_a_later_round_has_begun(self, store):
        """A slow step ends while the server has the next round begin: no vector of the one before leaves."""
        store.begin(RUN, 3)
        store.begin(RUN, 4)
        store.keep(RUN, 4, SECRET)
        with pytest.raises(ProtocolError, match="the attempt at round 3 is over"):
            store.keep(RUN, 3, b"of the one before")
        assert store.take(RUN, 4) == SECRET

    def test_replaces_a_state_by_that_of_the_next_step(self, store):
        assert store.replace(RUN, lambda kept: (b"1", kept)) == b""
        assert [store.replace(RUN, lambda kept: (kept + b"1", kept)) for _ in range(2)] == [b"1", b"11"]

    def test_has_no_state_after_a_step_that_is_refused(self, store):
        def refused(kept):
            raise ProtocolError("refused")

        store.replace(RUN, lambda kept: (SECRET, kept))
        with pytest.raises(ProtocolError, match="refused"):
            store.replace(RUN, refused)
        assert store.replace(RUN, lambda kept: (b"", kept)) == b""


class Seen:
    """A look at what is kept, which two have had before either goes on, if two may look at the same time."""

    def __init__(self, patience):
        self.readers = Barrier(2, timeout=patience)

    def __call__(self, look):
        def seen(*given):
            found = look(*given)
            with suppress(BrokenBarrierError):  # the other one is not let in
                self.readers.wait()
            return found

        return seen


class Unlocked(FolderStore):
    """A twin that works on the folder whoever else does."""

    @contextmanager
    def _alone(self):
        yield


class TestTwoAtTheSameTime:
    """Each has the folder open for itself, as two processes have."""

    # Where a lock keeps the other one out, all of it passes; where there is none, both have looked long before.
    PATIENCE: ClassVar = {FolderStore: 0.3, Unlocked: 60.0}

    def takers(self, kind, shelf, monkeypatch):
        FolderStore(str(shelf)).begin(RUN, 1)
        FolderStore(str(shelf)).keep(RUN, 1, SECRET)
        monkeypatch.setattr(FolderStore, "_get", Seen(self.PATIENCE[kind])(FolderStore._get))
        return both(lambda: kind(str(shelf)).take(RUN, 1) or None)

    def beginners(self, kind, shelf, monkeypatch):
        monkeypatch.setattr(FolderStore, "_last", Seen(self.PATIENCE[kind])(FolderStore._last))
        return both(lambda: kind(str(shelf)).begin(RUN, 1) or True)

    def replaced(self, kind, shelf, monkeypatch):
        """The states that two refused steps have begun with."""
        FolderStore(str(shelf)).replace(RUN, lambda kept: (SECRET, kept))
        monkeypatch.setattr(FolderStore, "_get", Seen(self.PATIENCE[kind])(FolderStore._get))
        found = []

        def refused(kept):
            found.append(kept)
            raise ProtocolError("refused")

        both(lambda: kind(str(shelf)).replace(RUN, refused))
        return sorted(found)

    def test_one_step_begins_with_the_state(self, shelf, monkeypatch):
        assert self.replaced(FolderStore, shelf, monkeypatch) == [b"", SECRET]

    def test_a_twin_without_a_lock_takes_both_steps_from_one_state(self, shelf, monkeypatch):
        assert self.replaced(Unlocked, shelf, monkeypatch) == [SECRET, SECRET]

    def test_one_gets_the_attempt(self, shelf, monkeypatch):
        assert self.takers(FolderStore, shelf, monkeypatch) == 1

    def test_one_begins_the_round(self, shelf, monkeypatch):
        assert self.beginners(FolderStore, shelf, monkeypatch) == 1

    def test_a_twin_without_a_lock_gives_both_the_attempt(self, shelf, monkeypatch):
        assert self.takers(Unlocked, shelf, monkeypatch) == 2

    def test_a_twin_without_a_lock_begins_the_round_twice(self, shelf, monkeypatch):
        assert self.beginners(Unlocked, shelf, monkeypatch) == 2


class TestAFolder:
    def kept(self, shelf):
        store = FolderStore(str(shelf))
        store.begin(RUN, 1)
        store.keep(RUN, 1, SECRET)
        return store, shelf / f"{RUN}.attempt"

    @pytest.mark.parametrize(("seconds", "found"), [(86_300, SECRET), (86_500, b"")])
    def test_keeps_an_attempt_for_a_day(self, shelf, seconds, found):
        store, file = self.kept(shelf)
        before = file.stat().st_mtime - seconds
        os.utime(file, (before, before))
        assert store.take(RUN, 1) == found and not file.exists()

    @pytest.mark.parametrize("content", ["", "1", "x" * 20, "-0000000000000000001"])
    def test_takes_part_in_nothing_more_if_the_if_the_number_of_its_round_is_none(self, content, shelf):
        store, _ = self.kept(shelf)
        (shelf / f"{RUN}.round").write_text(content)
        with pytest.raises(ProtocolError, match=NO_NUMBER):
            store.begin(RUN, 2)

    def test_that_was_cleared_holds_nothing(self, shelf):
        store, _ = self.kept(shelf)
        store.clear()
        assert not list(shelf.iterdir())

    def test_is_emptied_by_a_warm_node_that_starts_or_ends(self, shelf):
        from cloister.deploy.warm.node import _clear_secrets

        self.kept(shelf)
        _clear_secrets(node_of({"secure-state": str(shelf)}))
        assert not list(shelf.iterdir())

    def test_that_is_on_a_disk_is_refused(self, shelf, tmp_path, monkeypatch):
        device = shelf.stat().st_dev
        mounts = tmp_path / "mounts"
        mounts.write_text(f"22 1 {os.major(device)}:{os.minor(device)} / /x rw shared:1 - ext4 /dev/sda rw\n")
        monkeypatch.setattr(round_state, "MOUNTS", mounts)
        self.check_refused(shelf, "is on ext4; it must be in memory: tmpfs or ramfs")

    @pytest.mark.parametrize("mode", [0o750, 0o701, 0o777, 0o500])
    def test_that_others_can_look_into_is_refused(self, mode, shelf):
        shelf.chmod(mode)
        self.check_refused(shelf, "must be a folder of this user, with mode 0700")

    def test_of_another_user_is_refused(self, shelf, monkeypatch):
        monkeypatch.setattr(round_state.os, "geteuid", lambda: 12345)
        self.check_refused(shelf, "must be a folder of this user, with mode 0700")

    def test_behind_a_link_is_refused(self, shelf):
        (shelf / "inner").mkdir(mode=0o700)
        (shelf / "link").symlink_to(shelf / "inner")
        self.check_refused(shelf / "link", "must be a folder of this user")

    def test_that_no_mount_is_known_of_is_refused(self, shelf, tmp_path, monkeypatch):
        (tmp_path / "mounts").write_text("22 1 0:0 / /x rw - tmpfs tmpfs rw\n")
        monkeypatch.setattr(round_state, "MOUNTS", tmp_path / "mounts")
        with pytest.raises(NodeConfigError) as refused:
            FolderStore(str(shelf)).begin(RUN, 1)
        kind = "a file system of unknown kind; it must be in memory: tmpfs or ramfs"
        assert str(refused.value) == f"secure-state {shelf} is on {kind}"

    def test_that_is_not_there_is_refused(self, shelf):
        self.check_refused(shelf / "absent", "No such file or directory")

    def check_refused(self, folder, says):
        with pytest.raises(NodeConfigError, match=f"^secure-state {folder}.*({says})"):
            FolderStore(str(folder)).begin(RUN, 1)


def run_on(shelf, folder, clients=3, gone=None, app=None):
    """A run whose nodes have a folder each, and nothing else that outlives a message."""
    nodes = []
    for number in range(clients):
        own = shelf / str(number)
        own.mkdir(mode=0o700)
        kept = {"secure-state": str(own), "ledger-dir": str(folder / f"ledgers-{number}")}
        nodes.append({"partition-id": number, "num-partitions": clients, **kept})
    run = SecureRun(settings(folder, clients, clients // 2 + 1, z=0.0), UPDATES[:clients], nodes=nodes)
    run.grid._client_app = forgetful(app or app_with(UPDATES, gone))
    return run


def forgetful(app):
    """An app that finds no state of Flower's, as if each message had another process."""

    def answer(message, context):
        context.state = RecordDict()
        return app(message, context)

    return answer


UPDATES = random_updates(5)
LAYOUT = Layout.of(MODEL)


def whole(number, run):
    """Return a client's addend to the sum."""
    row = LAYOUT.rows({name: MODEL[name] + UPDATES[number][name] for name in MODEL})
    return quantize_update(Updates.of(LAYOUT, LAYOUT.rows(MODEL), (row,)), plan_of(run))


def plan_of(run):
    return run.strategy.mechanism.plan(LAYOUT.size)


class TestARound:
    @pytest.mark.parametrize("gone", [{}, {2: "mask"}, {1: "sign", 4: "share"}])
    def test_gives_the_exact_sum_though_no_process_outlives_a_message(self, gone, shelf, tmp_path):
        run = run_on(shelf, tmp_path, 5, gone)
        summed = run.collect()
        left = [n for n in range(5) if gone.get(n + 1) not in ("share", "mask")]
        assert summed.sum.survivors == len(left)
        assert np.array_equal(summed.sum.total, sum(whole(number, run) for number in left))

    def test_leaves_numbers_of_rounds_and_nothing_else(self, shelf, tmp_path):
        run = run_on(shelf, tmp_path)
        assert [run.collect(number).sum.survivors for number in (1, 2)] == [3, 3]
        assert {path.name for path in shelf.glob("*/*")} == {"1.round"}

    @pytest.mark.parametrize(("left", "says"), [(None, "no attempt at round 1"), (-1, "the bytes are no Attempt")])
    def test_goes_on_without_a_node_whose_folder_is_new_or_whose_file_is_torn(self, left, says, shelf, tmp_path):
        inner = app_with(UPDATES)

        def restarted(message, context):
            if (context.node_id, phase_of(message)) == (2, "mask"):
                file = shelf / "1" / "1.attempt"
                content = file.read_bytes()
                FolderStore(str(shelf / "1")).clear()
                if left is not None:
                    (shelf / "1" / "1.round").write_bytes(b"%020d" % 1)
                    file.write_bytes(content[:left])
            return inner(message, context)

        summed = run_on(shelf, tmp_path, app=restarted).collect()
        assert summed.sum.survivors == 2
        assert says in summed.rejected[0].detail

    def test_is_over_for_a_node_with_another_roster_or_name_than_it_began_with(self, shelf, tmp_path):
        run = run_on(shelf, tmp_path, gone=dict.fromkeys((1, 2, 3), "share"))
        run.collect()
        run.grid._client_app = forgetful(app_with(UPDATES))
        for context, number in zip(run.grid._contexts.values(), (1, 2, 0), strict=True):
            context.node_config["partition-id"] = number
        for asked in [one for one in run.asked if phase_of(one) == "share"]:
            assert reply_to(run, asked).error.reason == (
                "ProtocolError: this state belongs to another name, roster or run, or to other terms of a round"
            )

    def test_needs_a_folder_where_processes_end_with_their_message(self, tmp_path, monkeypatch):
        monkeypatch.setattr(secure, "LOCAL_RUN", 2)
        summed = SecureRun(settings(tmp_path, 3, 2), UPDATES[:3]).collect()
        words = (
            "code 2: ProtocolError: this node has no secure-state in its configuration to keep an attempt in between "
            "messages"
        )
        assert [one.detail for one in summed.rejected] == [words] * 3


def reply_to(run, message, content=None):
    node, kind = message.metadata.dst_node_id, message.metadata.message_type
    (reply,) = run.grid.send_and_receive([Message(content or message.content, node, kind)])
    return reply


class Copying(FolderStore):
    """A twin that leaves what it gives where it is."""

    def take(self, run, number):
        with self._alone():
            return self._get(run)


class Asking:
    """A server that asks for a signature on a second list while the node is at the signature on the first.

    It wants the vector of the first node, which survives by one list, and by the other does not.
    """

    def __init__(self, shelf, folder, monkeypatch):
        self.run = run_on(shelf, folder, gone=dict.fromkeys((1, 2, 3), "sign"))
        self.run.collect()
        self.run.grid._client_app = forgetful(app_with(UPDATES))
        self.asked = [one for one in self.run.asked if phase_of(one) == "sign"]
        self.whole = Survivors.decode(self.asked[0].content.config_records[CONFIG][SECURE_MESSAGE])
        self.fewer = Survivors(self.whole.names[1:], dict(list(self.whole.signatures.items())[1:]))
        self.stepped, self.refused, self.first, self.second = secure._stepped, [], {}, {}
        self.shares = {}
        monkeypatch.setattr(secure, "_stepped", self.interrupted)

    def interrupted(self, member, step, content):
        """A step of a node; at the first list it is asked for the second, and then the next node for both."""
        if step == SIGN and content == self.whole.encode():
            self.ask(self.asked[len(self.first)], SIGN, self.fewer, self.second)
            self.first[member.name] = None
            self.sign_by_next()
        return self.stepped(member, step, content)

    def sign_by_next(self):
        """Have the next node sign the first list; once all are at it, those of the second are unmasked."""
        if len(self.first) < len(self.asked):
            asked = self.asked[len(self.first)]
            self.ask(asked, SIGN, self.whole, self.first)
        else:
            self.unmask(self.second)

    def ask(self, asked, step, told, signed):
        reply = self.reply(asked, step, told)
        if reply.has_error():
            self.refused.append(reply.error.reason)
            return
        one = SurvivorSignature.decode(from_record(reply.content["arrays"])[SECURE_MESSAGE].tobytes())
        signed[one.name] = one.signature

    def reply(self, asked, step, told):
        content = RecordDict(dict(asked.content))
        fields = {**asked.content.config_records[CONFIG], SECURE_MESSAGE: told.encode(), SECURE_STEP: step}
        content[CONFIG] = type(asked.content.config_records[CONFIG])(fields)
        return reply_to(self.run, asked, content)

    def unmask(self, signed):
        told = Signatures({name: one for name, one in signed.items() if one})
        for asked in self.asked:
            reply = self.reply(asked, "unmask", told)
            if not reply.has_error():
                shown = Unmasking.decode(from_record(reply.content["arrays"])[SECURE_MESSAGE].tobytes())
                self.shares.setdefault(signed is self.first, {})[shown.name] = shown.shares

    def attack(self):
        """The vector of the first node, as far as the shares that were shown give it away; None: they do not."""
        self.sign_by_next()
        self.unmask(self.first)
        victim, names = self.whole.names[0], self.whole.names
        own, of_key = ({h: one[victim] for h, one in self.shares.get(k, {}).items()} for k in (True, False))
        if min(len(own), len(of_key)) < 2:
            return None
        asked = next(one for one in self.run.asked if phase_of(one) == "share")
        cohort = Cohort.decode(asked.content.config_records[CONFIG][SECURE_MESSAGE])
        vectors = [one for one in map(masked_of, self.run.answered) if one and one.name == victim]
        terms = self.run.strategy._terms(1, plan_of(self.run), self.run.asked).under(secure._simulated(3)[1])
        return stripped(vectors[0], terms, cohort, victim, combine(own, names, 2), {victim: combine(of_key, names, 2)})


def masked_of(reply):
    try:
        return MaskedInput.decode(from_record(reply.content["arrays"])[SECURE_MESSAGE].tobytes())
    except (ProtocolError, KeyError, ValueError):
        return None


class TestAServerThatAsksWhileANodeIsAtIt:
    def test_gets_one_signature_and_one_unmasking(self, shelf, tmp_path, monkeypatch):
        server = Asking(shelf, tmp_path, monkeypatch)
        assert server.attack() is None
        assert not server.second and len(server.refused) == 3
        assert all("takes part in no attempt" in reason for reason in server.refused)
        assert sorted(server.shares[True]) == sorted(server.whole.names)

    def test_a_twin_that_copies_instead_of_taking_leaks_by_two_unmaskings(self, shelf, tmp_path, monkeypatch):
        monkeypatch.setattr(secure, "FolderStore", Copying)
        server = Asking(shelf, tmp_path, monkeypatch)
        assert np.array_equal(server.attack(), whole(0, server.run))

    @pytest.mark.parametrize("kind", [FolderStore, Copying])
    def test_gets_one_kind_of_share_by_asking_again(self, kind, shelf, tmp_path, monkeypatch):
        """The secret shares are gone with the signature: asked again, even the twin has nothing else to show."""
        monkeypatch.setattr(secure, "FolderStore", kind)
        run = run_on(shelf, tmp_path)
        run.collect()
        (last, *_) = [one for one in run.asked if phase_of(one) == "unmask"]
        assert reply_to(run, last).has_error() == (kind is FolderStore)
