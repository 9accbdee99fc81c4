"""The SuperLink: its database when it is busy or full, its keys, and what it says of certificates."""

import shutil
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Event

import pytest
from closed_link import configuration, signed_by
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SubStatus
from flwr.proto.control_pb2 import RegisterNodeRequest
from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore import sql_mixin
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.constant import (
    TaskType,
)
from flwr.supercore.corestate import sql_corestate
from flwr.supercore.error import FlowerError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from flwr.superlink.servicer.control import control_handlers
from flwr.superlink.servicer.fleet import fleet_handlers
from starlette.testclient import TestClient

from cloister.deploy import credentials
from cloister.deploy.superlink import serve as serve_module
from cloister.deploy.superlink.gate import SECONDS, RevokedKeys, RunningRuns
from cloister.deploy.superlink.serve import closed_app

pytestmark = pytest.mark.usefixtures("flower_as_it_was")


@pytest.fixture
def superlink(tmp_path, monkeypatch):
    """A client of a SuperLink whose database waits for others for a moment only."""
    monkeypatch.setattr(serve_module, "BUSY_SECONDS", 0.05)
    serve_module.set_up_databases(10**9)
    with TestClient(closed_app(configuration(tmp_path / "state.db")), raise_server_exceptions=False) as client:
        yield client


class TestDatabase:
    def lock(self, path):
        """Somebody else who writes and does not come to an end."""
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        return closing(other)

    def state(self, path):
        factory = LinkStateFactory(str(path), NoOpFederationManager(), ObjectStoreFactory(str(path)))
        return factory.state()

    def test_a_locked_database_is_a_503_that_flowers_clients_repeat(self, superlink, tmp_path, caplog):
        private, public = generate_key_pairs()
        body = RegisterNodeFleetRequest(public_key=public_key_to_bytes(public)).SerializeToString()
        with self.lock(tmp_path / "state.db"):
            busy = superlink.post("/v1/fleet/register-node", content=body, headers=signed_by(private, public))
        again = superlink.post("/v1/fleet/register-node", content=body, headers=signed_by(private, public))
        assert (busy.status_code, again.status_code) == (503, 200)
        assert "state database was locked" in caplog.text

    def test_flower_waits_for_others_for_half_a_minute(self, tmp_path):
        serve_module.set_up_databases(10**9)
        state = self.state(tmp_path / "state.db")
        assert [row["timeout"] for row in state.query("PRAGMA busy_timeout")] == [30000]

    def test_other_errors_of_the_database_stay_what_they_are(self, tmp_path):
        serve_module.set_up_databases(10**9)
        with pytest.raises(sql_mixin.SQLAlchemyError, match="no such table"):
            self.state(tmp_path / "state.db").query("SELECT * FROM nowhere")

    def test_its_size_has_a_limit(self, tmp_path):
        serve_module.set_up_databases(3 * 10**6)
        state = self.state(tmp_path / "state.db")
        state.query("CREATE TABLE ballast (content BLOB)")
        with pytest.raises(serve_module.HTTPException) as error:
            for _ in range(100):
                state.query("INSERT INTO ballast VALUES (zeroblob(100000))")
        assert error.value.status_code == 507
        assert (tmp_path / "state.db").stat().st_size <= 3 * 10**6

    def ballast(self, path):
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE ballast (content BLOB)")
            connection.executemany("INSERT INTO ballast VALUES (zeroblob(?))", [(100_000,)] * 50)
            connection.commit()
            connection.execute("DELETE FROM ballast")
            connection.commit()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def test_an_old_database_is_compacted_at_the_start(self, tmp_path):
        path = tmp_path / "state.db"
        self.state(path)
        self.ballast(path)
        assert path.stat().st_size > 5 * 10**6
        serve_module.prepare_database(path)
        assert path.stat().st_size < 10**6

    def test_the_time_for_which_it_was_not_there_does_not_count_against_who_was_at_a_task(self, tmp_path, monkeypatch):
        path = tmp_path / "state.db"
        serve_module.wait_for_tasks(path)  # a new one has none
        state = self.state(path)
        tasks = [state.create_task(TaskType.SERVER_APP, run) for run in (1, 2, 3)]
        tokens = [state.claim_task(task) for task in tasks]
        assert state.activate_task(tasks[0]) and state.activate_task(tasks[1])
        assert state.finish_task(tasks[1], SubStatus.COMPLETED, "")
        long_ago = "2020-01-01 00:00:00+00:00"
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE task SET active_until = ? WHERE active_until IS NOT NULL", (long_ago,))
        serve_module.wait_for_tasks(path)
        # A busy machine may take two minutes to start everything.
        monkeypatch.setattr(sql_corestate, "now", lambda: datetime.now(UTC) + timedelta(minutes=2))
        assert state.acknowledge_task_heartbeat(tasks[0]) and not state.acknowledge_task_heartbeat(tasks[1])
        assert [state.get_task_by_token(token) is not None for token in tokens] == [True, False, False]

    def test_it_is_made_ready_before_it_is_served(self, tmp_path, monkeypatch):
        (tmp_path / "operators").write_text("0" * 64)
        required = {"insecure": False, "superexec_auth_secret": b"secret", "enable_supernode_auth": True}
        config = replace(configuration(tmp_path / "state.db"), **required)
        before, ready = [], []
        monkeypatch.setattr(sys, "argv", sys.argv)
        monkeypatch.setattr(fleet_handlers, "check_abort", lambda *_: None)
        monkeypatch.setattr(serve_module, "parse_superlink_options", lambda: config)
        monkeypatch.setattr(serve_module, "wait_for_tasks", ready.append)
        monkeypatch.setattr(serve_module.uvicorn, "run", lambda **_: before.extend(ready))
        serve_module.serve(tmp_path / "operators", [])
        assert before == [tmp_path / "state.db"]

    @pytest.mark.parametrize("exists", [False, True])
    def test_what_is_freed_while_it_is_in_use_is_given_back(self, tmp_path, exists):
        path = tmp_path / "state.db"
        if exists:
            self.state(path)
        serve_module.prepare_database(path)
        state = self.state(path)
        self.ballast(path)
        before = path.stat().st_size
        assert before > 5 * 10**6
        assert serve_module.look_at_database(path, 10**9) == []
        assert path.stat().st_size < 10**6
        assert state.get_node_info() == []

    def test_what_is_scarce_is_said(self, tmp_path, monkeypatch):
        path = tmp_path / "state.db"
        self.state(path)
        size = path.stat().st_size
        assert "of the" in serve_module.look_at_database(path, size)[0]
        usage = shutil.disk_usage(path)
        monkeypatch.setattr(serve_module.shutil, "disk_usage", lambda _: usage._replace(free=10**6))
        assert serve_module.look_at_database(path, 10**9) == ["the disk of the state database has 1 MB left"]

    def test_it_is_looked_at_again_and_again(self, tmp_path, monkeypatch):
        looks, third = [], Event()

        def look(*found):
            looks.append(found)
            if len(looks) == 3:
                third.set()
            return []

        monkeypatch.setattr(serve_module, "look_at_database", look)
        ended = serve_module.watch_database(tmp_path, 5, interval=0.01)
        assert third.wait(60) and looks[:3] == [(tmp_path, 5)] * 3
        ended.set()


class TestRunningRuns:
    """A run whose status is asked for."""

    @pytest.fixture
    def runs(self, monkeypatch):
        """Flower's answers about each run, the times of the questions, and the time, which a test turns on."""
        said, asked, now = {1: None, 2: "Run is finished."}, [], [100.0]
        monkeypatch.setattr(fleet_handlers, "check_abort", lambda run, *_: asked.append(run) or said[run])
        RunningRuns(lambda: now[0]).install()
        return said, asked, now

    def ask(self, run):
        return fleet_handlers.check_abort(run, ["finished"], None)

    def test_a_running_run_is_asked_for_once_a_second(self, runs):
        _, asked, now = runs
        assert [self.ask(1) for _ in range(5)] == [None] * 5 and asked == [1]
        now[0] += SECONDS
        assert self.ask(1) is None and asked == [1, 1]

    def test_its_end_is_noticed_within_a_second(self, runs):
        said, _, now = runs
        self.ask(1)
        said[1] = "Run is finished."
        now[0] += SECONDS
        assert self.ask(1) == "Run is finished."

    def test_a_run_that_is_not_running_is_asked_for_each_time(self, runs):
        said, asked, _ = runs
        assert [self.ask(2) for _ in range(3)] == ["Run is finished."] * 3 and asked == [2] * 3
        said[2] = None
        assert self.ask(2) is None

    def test_runs_are_told_apart(self, runs):
        assert (self.ask(1), self.ask(2), self.ask(1)) == (None, "Run is finished.", None)


class TestRevoked:
    def request(self, key):
        return RegisterNodeRequest(public_key=key)

    def test_who_was_sent_away_is_told_from_who_takes_part(self, tmp_path):
        state = TestDatabase().state(tmp_path / "state.db")
        account = AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)
        _, public = credentials.new_node_key()
        request = self.request(public_key_to_bytes(load_ssh_public_key(public)))
        RevokedKeys().install()
        node = control_handlers.register_node(request, account, state).node_id
        with pytest.raises(FlowerError) as known:
            control_handlers.register_node(request, account, state)
        state.delete_node(NOOP_FLWR_AID, node)
        with pytest.raises(FlowerError) as gone:
            control_handlers.register_node(request, account, state)
        assert known.value.code == gone.value.code
        assert known.value.public_details is None and gone.value.public_details == "its node was unregistered"


def test_a_certificate_that_ends_soon_is_said(tmp_path):
    path = tmp_path / "server.crt"
    path.write_bytes(credentials.self_signed(credentials.new_tls_key(), "x", 30))
    for days, said in ((-1, "ended on"), (5, "ends on"), (29, "ends on"), (40, "")):
        now = credentials.expiry_of(path.read_bytes()) - timedelta(days=days)
        lines = credentials.expiring([path], now)
        assert [said in line and "server.crt" in line for line in lines] == ([True] if said else [])
        assert datetime.now(UTC) < now + timedelta(days=60)
