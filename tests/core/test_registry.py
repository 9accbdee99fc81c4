"""Plugins by name: built-ins, entry points beside them, and loud conflicts."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from cloister.client.trainers import PRIVATE_TRAINERS
from cloister.privacy.mechanisms.metric import DISTANCES
from cloister.strategies import STRATEGIES
from cloister.tasks import TASKS
from cloister.training.trainers import TRAINERS
from cloister.utils import registry
from cloister.utils.errors import PluginError
from cloister.utils.registry import Registry

GROUP = "cloister.things"
BUILTIN = {"path": "pathlib:Path", "purepath": "pathlib:PurePath"}


@pytest.fixture
def things():
    return Registry("thing", GROUP, BUILTIN)


@pytest.fixture
def install(monkeypatch):
    """Pretend that packages with these entry points are installed."""

    def pretend(**points):
        def entry_points(group):
            return [EntryPoint(name, value, group) for name, value in points.items()] if group == GROUP else []

        monkeypatch.setattr(registry, "entry_points", entry_points)

    return pretend


def test_built_in_plugins_need_no_entry_points(things, install):
    install()
    assert things.load("path") is Path
    assert things.names() == ["path", "purepath"]


def test_installed_packages_add_plugins(things, install):
    install(lists="builtins:list")
    assert things.load("lists") is list
    assert things.names() == ["lists", "path", "purepath"]


def test_only_the_registrys_own_group_counts(install):
    install(lists="builtins:list")
    assert Registry("other", "cloister.others", {}).names() == []


def test_the_same_object_may_be_registered_again(things, install):
    install(path="pathlib:Path")
    assert things.load("path") is Path


def test_two_claims_on_one_name_are_loud_whichever_name_is_asked_for(things, install):
    install(path="builtins:list")
    for ask in (things.names, lambda: things.load("purepath")):
        with pytest.raises(PluginError, match=r"thing 'path' is claimed twice: pathlib:Path and builtins:list"):
            ask()


def test_two_packages_that_claim_one_name_are_loud(things, monkeypatch):
    points = [EntryPoint("new", "builtins:list", GROUP), EntryPoint("new", "builtins:dict", GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    with pytest.raises(PluginError, match=r"thing 'new' is claimed twice: builtins:list and builtins:dict"):
        things.names()


def test_an_unknown_name_lists_the_known_ones(things, install):
    install(lists="builtins:list")
    with pytest.raises(PluginError, match=r"unknown thing 'nothing'; known: lists, path, purepath"):
        things.load("nothing")


@pytest.mark.parametrize(
    ("value", "cause"), [("no_such_module:Thing", ModuleNotFoundError), ("pathlib:NoSuchThing", AttributeError)]
)
def test_a_plugin_that_does_not_import_says_which_and_what_kind_of_error_and_not_its_text(
    things, install, value, cause
):
    install(broken=value)
    with pytest.raises(PluginError, match=rf"thing 'broken' \(.+\) does not load: {cause.__name__}$") as it:
        things.load("broken")
    assert isinstance(it.value.__cause__, cause)


def test_a_broken_plugin_does_not_stand_in_the_way_of_others(things, install):
    install(broken="no_such_module:Thing")
    assert things.load("path") is Path


def test_installed_packages_are_looked_through_once(things, install):
    install(late="builtins:list")
    assert "late" in things.names()
    install()
    assert things.load("late") is list


@pytest.mark.parametrize("known", [STRATEGIES, DISTANCES], ids=lambda known: known.kind)
def test_every_built_in_loads(known):
    assert all(known.load(name) is not None for name in known.names())


def test_every_kind_of_plugin_has_a_group_of_its_own():
    groups = [known.group for known in (STRATEGIES, DISTANCES, TASKS, TRAINERS, PRIVATE_TRAINERS)]
    assert len(set(groups)) == len(groups)
    assert all(group.startswith("cloister.") for group in groups)


def test_an_imported_plugin_is_loaded_without_silencing_standard_error(things, install, monkeypatch):
    install()
    monkeypatch.setattr(registry, "quiet_libraries", lambda: pytest.fail("standard error was replaced"))
    assert things.load("path") is Path
