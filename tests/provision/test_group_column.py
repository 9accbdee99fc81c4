"""The column of groups, with any name that a table can have, from `federation.toml` to the run."""

import pytest
from flwr.common.config import parse_config_args
from support import failures

from cloister.client.node import node_of
from cloister.client.policy import read_policy, render
from cloister.config.io import as_pairs, read_settings, toml_of
from cloister.config.run import parse
from cloister.deploy.provision.kits import provision
from cloister.deploy.provision.scripts import policy_for
from cloister.utils.errors import ConfigError

NAMES = ["Patient ID", "Größe (cm)", 'the "case"', "it's", r"a\1\g<0>", "#", "= 1"]
DESCRIPTION = """
name = "wards"
group = {group}
[server]
addresses = ["127.0.0.1"]
[[sites]]
name = "north"
data-path = "/data/north.csv"
"""


def test_a_kit_s_policy_has_the_federation_s_column(tmp_path):
    def check(name):
        folder = tmp_path / str(NAMES.index(name))
        folder.mkdir()
        (folder / "federation.toml").write_text(DESCRIPTION.format(group=toml_of(name)))
        provision(folder / "federation.toml", folder / "kits", policy_for)
        policy = read_policy(folder / "kits" / "sites" / "north" / "policy.toml")
        assert policy.group == name
        assert f"each {name} is protected as a whole" in render(policy)

    assert failures(NAMES, check) == []


def test_runs_and_nodes_take_the_same_names():
    def check(name):
        settings = {"task.group": name, "privacy.client": "dp-sgd", "privacy.server": "none"}
        assert parse(read_settings([as_pairs(settings)])).task.group == name
        assert node_of({"group": name}).group == name

    assert failures(NAMES, check) == []


def test_a_name_with_a_blank_passes_the_command_line_of_flower():
    assert node_of(parse_config_args(['group="Patient ID" public-size=200'])).group == "Patient ID"


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "\u202ea", "x" * 201])
def test_what_no_line_can_show_is_no_name(name):
    with pytest.raises(ConfigError, match="group"):
        node_of({"group": name})
