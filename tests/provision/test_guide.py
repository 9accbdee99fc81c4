"""The deployment guide, word for word: its files, its commands, in its order, on one machine in place of four."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "runtimes"))
from processes import Processes, free_ports  # noqa: E402

GUIDE = (ROOT / "docs" / "deploy.md").read_text()
SECTION = GUIDE[GUIDE.index("## Two machines over a network") : GUIDE.index("## Containers")]
STEPS = re.split(r"^\*\*(?=\d\. )", SECTION, flags=re.MULTILINE)[1:]
SECONDS = 240
PATIENT = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,{}\n"


def blocks(step, kind):
    """What the fences of a step hold; steps count from 1."""
    return re.findall(rf"^```{kind}\n(.*?)^```", STEPS[step - 1], flags=re.MULTILINE | re.DOTALL)


def test_the_guide_has_these_steps():
    titles = [re.match(r"\d\. ([\w ]+)", step).group(1) for step in STEPS]
    assert titles == [
        "Keys of their own",
        "Describe the federation",
        "Make the kits",
        "The server",
        "The operator",
        "The site",
        "Run",
    ]


class Machines:
    """The guide's machines: /srv is a folder here, fl.example.org this machine, and ports are those that are free."""

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
        """What the guide says, for these machines."""
        text = text.replace("/srv/", f"{self.srv}/").replace("fl.example.org", "localhost")
        return text.replace("port = 8000", f"port = {self.port}")

    def follow(self, name, commands):
        """Run the lines of a block in a checkout, as one shell would; the last line may be a service."""
        lines = self.here(commands).strip().splitlines()
        service = lines.pop() if lines[-1].endswith("./start.sh") else ""
        if service and " && " in service:
            lines.append(service.removesuffix(" && ./start.sh"))
        self.shell(name, "\n".join(lines))
        if service:
            place = re.search(r"^cd (\S+)", "\n".join(lines), flags=re.MULTILINE).group(1)
            self.processes.start(f"{name}-service", f"{place}/start.sh")

    def shell(self, name, script):
        script = f"cd {self.checkout}\n{script}"
        self.processes.run(name, shutil.which("bash"), "-euo", "pipefail", "-c", script, seconds=SECONDS)

    def put(self, kit, place):
        """Hand a kit over, as the prose says."""
        shutil.copytree(self.checkout / kit, self.srv / "cloister" / place)


@pytest.mark.slow
def test_whoever_follows_the_guide_trains_a_model(tmp_path, monkeypatch):
    monkeypatch.delenv("CLOISTER_DATA", raising=False)
    monkeypatch.setenv("EDITOR", "true")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Processes(tmp_path / "processes") as processes:
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
        for site, port in machines.ports.items():
            machines.put(f"kits/sites/{site}", site)
            if site == "south":
                (own,) = re.findall(r"`(cp node\.key [^`]+)`", STEPS[5])
                machines.shell("own-key", machines.here(own))
            monkeypatch.setenv("CLOISTER_PORT", str(port))
            (node,) = blocks(6, "sh")
            machines.follow(site, node.replace("north", site))
        (run,) = blocks(7, "sh")
        machines.follow("run", f"{run.strip()} 2>&1")
        (rounds,) = (machines.srv / "cloister" / "server" / "state" / "runs").glob("*/rounds.jsonl")
        found, last = rounds.parent, json.loads(rounds.read_text().splitlines()[-1])
        assert (last["round"], last["measured"]["accepted"], last["measured"]["rejected"]) == (10, 2, [])
        assert (found / "privacy.json").exists() and list(found.glob("model.*"))
        assert os.listdir(machines.checkout / "kits"), "the kits lie in the checkout, as the guide has them"
