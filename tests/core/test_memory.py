"""Free memory: that of the machine, within the limits of its control groups."""

import pytest

from cloister.utils.threads import free_memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    500 kB\n"


@pytest.fixture
def write(tmp_path):
    def written(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_S_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return written


def two(folder, limit, used, cache=0):
    """The files of a group of version 2."""
    base = f"sys__fs__cgroup__{folder}"
    return {
        f"{base}memory_S_max": f"{limit}\n",
        f"{base}memory_S_current": f"{used}\n",
        f"{base}memory_S_stat": f"anon 7\ninactive_file {cache}\nactive_file 3\n",
    }


def test_that_of_this_machine():
    assert 2**20 < free_memory() < 2**50


def test_nobody_tells(write):
    assert free_memory(write()) is None
    assert free_memory(write(proc__meminfo="MemTotal: 3 kB\n", proc__self__cgroup="0::/\n")) is None


def test_the_machine_alone(write):
    assert free_memory(write(proc__meminfo=MEMINFO, proc__self__cgroup="0::/a\n")) == 500 * 1024
    assert free_memory(write(**two("a__", "max", 3))) == 500 * 1024


@pytest.mark.parametrize("own", ["/", "/a", "/a/b"])
def test_the_tightest_group_of_version_2(write, own):
    root = write(proc__meminfo=MEMINFO, proc__self__cgroup=f"0::{own}\n", **two("", 400_000, 100_000, 20_000))
    assert free_memory(root) == 320_000
    found = free_memory(write(**two("a__", 50_000, 30_000)))
    assert found == (320_000 if own == "/" else 20_000)


def test_a_group_that_is_full_leaves_nothing(write):
    assert free_memory(write(proc__meminfo=MEMINFO, proc__self__cgroup="0::/\n", **two("", 100, 300))) == 0


def test_a_group_of_version_1(write):
    base = "sys__fs__cgroup__memory__"
    files = {
        f"{base}memory_S_limit_in_bytes": "9223372036854771712\n",
        f"{base}memory_S_usage_in_bytes": "5\n",
        f"{base}docker__x__memory_S_limit_in_bytes": "90000\n",
        f"{base}docker__x__memory_S_usage_in_bytes": "50000\n",
        f"{base}docker__x__memory_S_stat": "inactive_file 1\ntotal_inactive_file 10000\n",
        "proc__self__cgroup": "9:name=systemd:/y\n4:cpu,memory:/docker/x\n0::/\n",
    }
    assert free_memory(write(proc__meminfo=MEMINFO, **files)) == 50_000
