"""The shell scripts of the kits: what a linter says, how values get in, and whether they are installed."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from cloister.deploy.provision import scripts
from cloister.deploy.provision.federation import Federation

ROOT = Path(__file__).parents[2]
SHELL = sorted((ROOT / "cloister" / "deploy" / "shell").glob("*.sh"))
SCRIPTS = [*SHELL, *sorted((ROOT / "docker").glob("*.sh"))]
DESCRIPTION = {
    "name": "hospitals",
    "server": {"addresses": ["2001:db8::1"], "port": 8443},
    "sites": [{"name": "north", "data-path": "/data/$(touch /tmp/x) 'a' \"b\" `c`.npz"}],
}


def test_shellcheck_has_nothing_to_say():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", *map(str, SCRIPTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_shell_understands_them():
    for script in SCRIPTS:
        shell = script.read_text().splitlines()[0].split("/")[-1].split()[-1]
        subprocess.run([shell, "-n", str(script)], check=True)


@pytest.fixture
def federation():
    return Federation.model_validate(DESCRIPTION)


def test_every_place_for_a_value_is_filled(federation):
    (site,) = federation.sites
    made = [
        scripts.server_script(federation),
        scripts.site_script(federation, site),
        scripts.register_script(federation),
    ]
    assert len(made) == len(SHELL) and not [text for text in made if re.search("@[A-Z]+@", text)]


def test_a_value_is_one_word_of_the_shell_whatever_it_holds(federation):
    (site,) = federation.sites
    (line,) = (line for line in scripts.site_script(federation, site).splitlines() if line.startswith("address="))
    text = scripts.site_script(federation, site)
    config = text[text.index("config=") : text.index("\nstate=")]
    said = subprocess.run(
        ["sh", "-uc", f'{line}\n{config}\nprintf "%s\\n%s\\n" "$address" "$config"'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    path = json.dumps(DESCRIPTION["sites"][0]["data-path"])
    assert said == ["[2001:db8::1]:8443", f"data-path={path}"]


def test_a_place_without_a_value_is_an_error():
    with pytest.raises(KeyError, match="host"):
        scripts._filled("server.sh", name="hospitals")


def of_the_living(lines):
    """Run lines of shell after the definition of `alive`, and return their output."""
    (definition,) = (line for line in (SHELL[0].parent / "server.sh").read_text().splitlines() if "alive()" in line)
    return subprocess.run(["sh", "-uc", f"{definition}\n{lines}"], capture_output=True, text=True, check=True).stdout


def test_a_process_is_alive_from_its_first_moment():
    """One in about two hundred looks meets a process that has no command line yet."""
    look = "alive $one || echo $turn"
    turn = f"/usr/bin/env sleep 9 & one=$!; {look}; {look}; {look}; kill $one; wait $one 2>/dev/null"
    assert of_the_living(f"for turn in $(seq 400); do {turn}; done; true") == ""


def test_a_process_that_nothing_has_waited_for_is_dead():
    with subprocess.Popen(["true"]) as one:
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
        assert of_the_living(f"alive {one.pid} || echo dead") == "dead\n"


def test_an_installation_has_them():
    """Other files than Python's are installed only if the build is told of them."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    taken = {
        path
        for package, patterns in declared.items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    others = {
        path
        for path in (ROOT / "cloister").rglob("*")
        if path.is_file() and path.suffix != ".py" and path.parent.name != "__pycache__"
    }
    templates = set((ROOT / "cloister").rglob("*.jinja"))
    pages = {ROOT / "cloister" / "monitoring" / "templates" / name for name in ("live.js", "dashboard.css")}
    texts = {ROOT / "cloister" / "deploy" / name for name in ("nginx.conf", "policy.toml")}
    assert taken == others == {*SHELL, *templates, *pages, *texts} and SHELL and templates
