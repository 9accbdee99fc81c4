"""The guides to deployment and upkeep, word for word: files, commands, order; on one machine in place of four."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from cloister.secure_aggregation.roster import opened

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "runtimes"))
from processes import PROGRAMS, WARM_NODE, Processes, free_ports  # noqa: E402

GUIDE = (ROOT / "docs" / "deploy.md").read_text()
SECTION = GUIDE[GUIDE.index("## Two machines over a network") : GUIDE.index("## Containers")]
STEPS = re.split(r"^\*\*(?=\d\. )", SECTION, flags=re.MULTILINE)[1:]
UPKEEP = re.split(r"^\*\*(?=\d\. )", (ROOT / "docs" / "upkeep.md").read_text(), flags=re.MULTILINE)[1:]
SECONDS = 240
PATIENT = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,{}\n"


def blocks(step, kind, steps=STEPS):
    """Return the content of a step's fences; steps count from 1."""
    return re.findall(rf"^```{kind}\n(.*?)^```", steps[step - 1], flags=re.MULTILINE | re.DOTALL)


def test_the_guide_has_these_steps():
    titles = [re.match(r"\d\. ([\w ]+)", step).group(1) for step in STEPS]
    assert titles == [
        "Keys of their own",
        "Describe the federation",
        "Make the kits",
        "The server",
        "The operator",
        "The site",
        "The roster",
        "Run",
    ]


def test_the_page_about_upkeep_has_these_steps():
    titles = [re.match(r"\d\. ([\w ]+)", step).group(1) for step in UPKEEP]
    assert titles == [
        "The server",
        "A site",
        "Anchors",
        "A site",
        "The server",
        "Upgrade and rollback",
        "A new key",
        "A site that leaves",
    ]


class Machines:
    """The guides' machines: /srv is a folder here, fl.example.org this machine, and ports are those that are free.

    An environment of another version has the programs of this one, which say from where they were started.
    """

    def __init__(self, folder, processes):
        self.folder, self.processes = folder, processes
        self.port, *ports = free_ports(3)
        self.ports = dict(zip(("north", "south"), ports))
        self.checkout = folder / "checkout"
        self.checkout.mkdir()
        shutil.copytree(ROOT / "cloister", self.checkout / "cloister", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
            shutil.copy(ROOT / name, self.checkout)
        self.srv = folder / "srv"
        (self.srv / "data").mkdir(parents=True)
        for site in self.ports:
            lines = [PATIENT.format(number % 2) for number in range(60)]
            (self.srv / "data" / f"{site}.data").write_text("".join(lines))

    def here(self, text):
        """Return the guide's text, for these machines."""
        venv = r"python3 -m venv (\S+) && \S+/bin/pip install '\.\[keras\]' -c constraints\.txt"
        text = re.sub(venv, rf"bash {self.folder}/install.sh \1", text)
        text = text.replace("/srv/", f"{self.srv}/").replace("fl.example.org", "localhost")
        # Without the proxy, which has tests of its own.
        text = text.replace('superlink = "127.0.0.1:8001"', f'superlink = "127.0.0.1:{self.port}"')
        return text.replace("port = 8000", f"port = {self.port}")

    def installs(self):
        """Stand in for an installation in a new environment."""
        said = 'printf "#!/bin/sh\\necho %s \\$1 >&2\\nexec %s \\"\\$@\\"\\n"'
        line = f'{said} "installed in $1: $program" "{PROGRAMS}/$program" >"$1/bin/$program"'
        loop = f'for program in cloister flwr; do {line}; chmod +x "$1/bin/$program"; done'
        (self.folder / "install.sh").write_text(f'mkdir -p "$1/bin"\n{loop}\n')

    def follow(self, name, commands):
        """Run the lines of a block in a checkout, as one shell would; the last line may be a service."""
        lines = self.here(commands).strip().splitlines()
        service = lines.pop() if lines[-1].endswith("./start.sh") else ""
        if service and " && " in service:
            lines.append(service.removesuffix(" && ./start.sh"))
        self.shell(name, "\n".join(lines))
        if service:
            self.start(name)

    def start(self, name):
        """Start the service of a machine, with the environment that its unit names where there is one."""
        path = f"PATH={self.srv}/cloister/venv/bin:{PROGRAMS}:{os.environ['PATH']}"
        port = f"CLOISTER_PORT={self.ports.get(name, '')}"
        script = f"{self.srv}/cloister/{name}/start.sh"
        self.processes.start(f"{name}-service", "/usr/bin/env", path, port, script)

    def stop(self, name):
        """Stop it, as systemd would."""
        service = self.processes.services.pop(f"{name}-service")
        service.terminate()
        assert service.wait(SECONDS) == 0 or name != "server"

    def keep_up(self, name, block, machine=""):
        """Do what a block says, which may stop and start the service of the machine that it is about."""
        before = self.starts()
        for part in re.split(r"^(systemctl \w+ cloister\n)", block, flags=re.MULTILINE):
            if part.startswith("systemctl"):
                {"stop": self.stop, "start": self.start}[part.split()[1]](machine)
            elif part.strip():
                self.shell(name, self.here(part))
        if "systemctl start" in block and machine == "server":
            self.processes.wait(lambda: self.starts() > before, SECONDS, "start of the SuperLink")

    def starts(self):
        """Return the number of times that the SuperLink was ready so far."""
        return self.processes.log("server-service").count("Application startup complete")

    def sites(self):
        """The sites as the operator sees them: name and state of each that was ever let in."""
        self.processes.folder.joinpath("sites.log").unlink(missing_ok=True)
        self.shell("sites", 'FLWR_HOME="$PWD/kits/operator" cloister site list hospitals')
        return sorted(tuple(line.split("  ")[:2]) for line in self.processes.log("sites").splitlines())

    def shell(self, name, script):
        script = f"cd {self.checkout}\n{script}"
        self.processes.run(name, shutil.which("bash"), "-euo", "pipefail", "-c", script, seconds=SECONDS)

    def put(self, kit, place):
        """Hand a kit over, as the prose says."""
        shutil.copytree(self.checkout / kit, self.srv / "cloister" / place)


@pytest.fixture
def deployed(tmp_path, monkeypatch):
    """The machines of the deployment guide, after its last step."""
    monkeypatch.delenv("CLOISTER_DATA", raising=False)
    monkeypatch.setenv("EDITOR", "true")
    monkeypatch.setenv("CLOISTER_NODE", " ".join(WARM_NODE))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Processes(tmp_path / "processes", shortened=True) as processes:
        machines = Machines(tmp_path, processes)
        (keys,) = blocks(1, "sh")
        machines.follow("keys", keys)
        (description,) = blocks(2, "toml")
        (machines.checkout / "federation.toml").write_text(machines.here(description))
        (kits,) = blocks(3, "sh")
        machines.follow("kits", kits)
        machines.put("kits/server", "server")
        (server,) = blocks(4, "sh")
        machines.follow("server", server)
        processes.wait(lambda: "Uvicorn running" in processes.log("server-service"), SECONDS, "SuperLink")
        (register,) = blocks(5, "sh")
        machines.follow("operator", register)
        assert re.findall(r"^(\w+): (\w+)$", processes.log("operator"), flags=re.MULTILINE) == [
            ("north", "registered"),
            ("south", "registered"),
        ]
        for site in machines.ports:
            machines.put(f"kits/sites/{site}", site)
            if site == "south":
                (own,) = re.findall(r"`(cp node\.key [^`]+)`", STEPS[5])
                machines.shell("own-key", machines.here(own))
            (node,) = blocks(6, "sh")
            machines.follow(site, node.replace("north", site))
        for site in machines.ports:
            made = machines.srv / "cloister" / site / "state" / "signing.pub"
            processes.wait(made.exists, SECONDS, "signing key of a site")
        (roster,) = blocks(7, "sh")
        machines.follow("roster", roster)
        (run,) = blocks(8, "sh")
        machines.follow("run", f"{run.strip()} 2>&1")
        yield machines


@pytest.mark.runtimes(minutes=2)
def test_whoever_follows_the_guides_trains_a_model_and_keeps_it_up(deployed):
    trained(deployed)
    kept_up(deployed)


def trained(machines):
    kits = machines.checkout / "kits"
    signed = opened((machines.srv / "cloister" / "north" / "roster.signed").read_bytes())
    assert signed.roster.at_site == {"north", "south"} and not list(kits.rglob("signing.key"))
    (rounds,) = (machines.srv / "cloister" / "server" / "state" / "runs").glob("*/rounds.jsonl")
    found, last = rounds.parent, json.loads(rounds.read_text().splitlines()[-1])
    assert (last["round"], last["measured"]["accepted"], last["measured"]["rejected"]) == (3, 2, [])
    assert (found / "privacy.json").exists() and list(found.glob("model.*"))
    assert os.listdir(machines.checkout / "kits"), "the kits lie in the checkout, as the guide has them"


def kept_up(machines):
    """Everything on the page, on what was deployed; between its steps the federation trains, and disks break."""
    srv, processes = machines.srv, machines.processes
    for folder in ("backup", "anchors"):
        (srv / folder).mkdir()
    machines.installs()
    (back_up,) = blocks(1, "sh", UPKEEP)
    machines.keep_up("back-up", back_up, "server")
    (back_up,) = blocks(2, "sh", UPKEEP)
    machines.keep_up("back-up", back_up)
    upgrade, roll_back = blocks(6, "sh", UPKEEP)
    machines.keep_up("upgrade", upgrade, "server")
    assert f"installed in {srv}/cloister/venv-new: cloister superlink" in processes.log("server-service")
    (run,) = blocks(8, "sh")
    more = "num-rounds=2 privacy.server='global-dp' privacy.noise-multiplier=2.0"
    machines.follow("again", run.replace("num-rounds=3", more).replace("privacy.server='none' ", ""))

    (anchor,) = blocks(3, "sh", UPKEEP)
    machines.keep_up("anchor", anchor)
    shutil.copy(machines.checkout / "kits" / "operator" / "nodes" / "north.pub", srv / "anchors")
    (kept,) = (srv / "cloister" / "north" / "state" / "ledgers").glob("*.heads.json")
    shutil.copy(kept, srv / "anchors" / "north.heads.json")

    gone = processes.services.pop("south-service")
    (leave,) = blocks(8, "sh", UPKEEP)
    machines.keep_up("leave", leave)
    assert gone.wait(SECONDS) != 0 and ("south", "unregistered") in machines.sites()

    restore, sites, heads, newest = blocks(5, "sh", UPKEEP)
    machines.keep_up("restore", restore, "server")
    assert "unregistered" not in dict(machines.sites()).values(), "an old database knows nobody who was sent away"
    machines.keep_up("sites", sites)
    assert ("south", "unregistered") in machines.sites()
    with pytest.raises(AssertionError, match="heads ended with 1"):
        machines.keep_up("heads", heads)
    assert "unbroken" in processes.log("heads") and "lines were cut off" in processes.log("heads")
    machines.keep_up("newest-of-server", newest)
    assert "no line that was there when --head was noted has been cut off" in processes.log("newest-of-server")

    restore, newest = blocks(4, "sh", UPKEEP)
    with pytest.raises(AssertionError, match="restore ended with 1"):
        machines.keep_up("restore", restore, "north")
    assert "unbroken" in processes.log("restore") and "lines were cut off" in processes.log("restore")
    machines.keep_up("newest", newest, "north")
    assert "nothing that was there when they were signed was cut off" in processes.log("newest")

    shutil.rmtree(machines.checkout / "kits" / "sites" / "north")
    old = processes.services.pop("north-service")
    (rotate,) = blocks(7, "sh", UPKEEP)
    machines.keep_up("rotate", rotate)
    assert old.wait(SECONDS) != 0, "the old key is refused"
    shutil.copy(machines.checkout / "kits" / "sites" / "north" / "node.key", srv / "cloister" / "north")
    machines.keep_up("roll-back", roll_back, "server")
    machines.start("north")
    processes.wait(lambda: ("north", "online") in machines.sites(), SECONDS, "node with a new key")
    assert machines.sites() == [("north", "online"), ("north", "unregistered"), ("south", "unregistered")]
