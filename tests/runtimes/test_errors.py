"""What `flwr run` shows of a run that cannot begin."""

from pathlib import Path

import pytest
from processes import CONNECTION, Processes

pytestmark = pytest.mark.runtimes

SECONDS = 240


@pytest.mark.parametrize("simulated", [False, True])
def test_an_error_of_configuration_is_one_line_and_the_run_has_failed(tmp_path: Path, simulated: bool) -> None:
    settings = {"strategy.momentum": 0.5, "output-dir": str(tmp_path / "runs")}
    federation = ["--federation-config", "num-supernodes=2 init-args-log-to-driver=false"] if simulated else []
    with Processes(tmp_path / "processes", shortened=True) as processes:
        processes.superlink(*(["--simulation"] if simulated else []))
        processes.flwr_run(settings, *federation, seconds=SECONDS)
        said = processes.log("flwr")
        (found,) = processes.told("flwr", "list", CONNECTION, "--format", "json")["runs"]
    (line,) = (line for line in said.splitlines() if "strategy.momentum" in line)
    assert "ConfigError: strategy.momentum = 0.5 is not an option of 'fedavg'" in line
    assert "Traceback" not in said and "File " not in said, said
    assert found["status"] == "finished:failed"
    assert not (tmp_path / "runs").exists()
