"""Permission to give orders to a SuperLink: the plugin between Flower's Control interface and its callers."""

import hashlib
import sys
from dataclasses import replace

import pytest
from closed_link import configuration
from flwr.common.constant import ACCESS_TOKEN_KEY
from flwr.supercore.error import FlowerError
from typer.testing import CliRunner

from cloister.cli import app
from cloister.deploy.credentials import credentials_file, digest_of, new_token, read_digests
from cloister.deploy.superlink import serve as superlink
from cloister.deploy.superlink.serve import OperatorsOnly, serve
from cloister.utils.errors import ConfigError

TOKEN = "a token"


@pytest.fixture
def plugin():
    return OperatorsOnly((digest_of("another"), digest_of(TOKEN)))


class TestTokens:
    def test_an_operator_is_known(self, plugin):
        valid, account = plugin.validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, TOKEN)])
        assert valid and account is not None

    def test_nobody_else_is(self, plugin):
        for metadata in (
            [],
            [(ACCESS_TOKEN_KEY, "")],
            [(ACCESS_TOKEN_KEY, "a tokem")],
            [(ACCESS_TOKEN_KEY, digest_of(TOKEN))],
            [(ACCESS_TOKEN_KEY, TOKEN.encode())],
            [("flwr-oidc-refresh-token", TOKEN)],
            [(ACCESS_TOKEN_KEY, TOKEN), (ACCESS_TOKEN_KEY, TOKEN)],
        ):
            assert plugin.validate_tokens_in_metadata(metadata) == (False, None)

    def test_tokens_are_neither_issued_nor_renewed(self, plugin):
        with pytest.raises(FlowerError):
            plugin.get_auth_tokens("device")
        with pytest.raises(FlowerError):
            plugin.refresh_tokens([("flwr-oidc-refresh-token", "none")])

    def test_they_are_random(self):
        assert len({new_token() for _ in range(50)}) == 50 and len(new_token()) == 43


def test_flowers_command_finds_the_token_where_it_looks_for_one(tmp_path, monkeypatch):
    from flwr.cli.auth_plugin.oidc_cli_plugin import OidcCliPlugin
    from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

    path = tmp_path / "credentials.yaml"
    path.write_text(credentials_file("host:8000", TOKEN))
    plugin = OidcCliPlugin("host:8000")
    plugin.store = FileCredentialStore(path)
    plugin.load_tokens()
    assert dict(plugin.write_tokens_to_metadata([]))[ACCESS_TOKEN_KEY] == TOKEN
    assert plugin.store.get("flower.account-auth.host:8000.authn-type") == b"oidc"


class TestOperatorsFile:
    def test_a_digest_a_line(self, tmp_path):
        path = tmp_path / "operators"
        path.write_text(f"{digest_of('a')}  alice\n\n{digest_of('b')}\n")
        assert read_digests(path) == (hashlib.sha256(b"a").hexdigest(), hashlib.sha256(b"b").hexdigest())

    def test_without_an_operator_nothing_is_served(self, tmp_path):
        path = tmp_path / "operators"
        for content in ("", "\n", "token\n", "a" * 63, "A" * 64):
            path.write_text(content)
            with pytest.raises(ConfigError, match="at least one"):
                serve(path, [])

    def test_no_file(self, tmp_path):
        result = CliRunner().invoke(app, ["superlink", "--operators", str(tmp_path / "none")])
        assert result.exit_code == 1 and "No such file" in result.output

    @pytest.mark.parametrize(
        ("missing", "option", "remedy"),
        [
            ({"insecure": True}, "--insecure", "--ssl-certfile"),
            ({"enable_supernode_auth": False}, "--enable-supernode-auth", "start.sh"),
            ({"superexec_auth_secret": None}, "--superexec-auth-secret-file", "superexec.secret"),
        ],
    )
    def test_what_a_stranger_could_use_is_refused_with_the_option_and_the_remedy(
        self, tmp_path, monkeypatch, missing, option, remedy
    ):
        path = tmp_path / "operators"
        path.write_text(digest_of(TOKEN))
        required = {"insecure": False, "superexec_auth_secret": b"secret", "enable_supernode_auth": True}
        config = replace(configuration(tmp_path / "state.db"), **required | missing)
        monkeypatch.setattr(superlink, "parse_superlink_options", lambda: config)
        monkeypatch.setattr(superlink.uvicorn, "run", lambda **_: pytest.fail("it serves"))
        monkeypatch.setattr(sys, "argv", sys.argv)
        with pytest.raises(ConfigError, match=option) as error:
            serve(path, [])
        assert remedy in str(error.value)

    def test_a_port_of_flowers_beside_it_is_refused(self, tmp_path, monkeypatch):
        name = "FLWR_INTERNAL_GRPC_FLEET_API"
        path = tmp_path / "operators"
        path.write_text(digest_of(TOKEN))
        secure = {"insecure": False, "superexec_auth_secret": b"secret", "enable_supernode_auth": True}
        monkeypatch.setattr(superlink, "parse_superlink_options", lambda: replace(configuration(tmp_path), **secure))
        monkeypatch.setattr(superlink.uvicorn, "run", lambda **_: pytest.fail("it serves"))
        monkeypatch.setattr(sys, "argv", sys.argv)
        monkeypatch.setenv(name, "1")
        with pytest.raises(ConfigError, match=f"{name} is set: .*; unset it"):
            serve(path, [])

    def test_tokens_never_travel_in_the_clear(self, tmp_path):
        path = tmp_path / "operators"
        path.write_text(digest_of(TOKEN))
        result = CliRunner().invoke(app, ["superlink", "--operators", str(path), "--insec", "--port", "1"])
        assert result.exit_code == 1 and "in the clear" in result.output
