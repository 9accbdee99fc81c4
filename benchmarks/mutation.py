"""How many wrong lines the tests find: mutmut over a random sample of the mutants of the privacy core.

    pip install -e '.[mutation]' -c constraints.txt
    python benchmarks/mutation.py --count 200 --seed 1    # a sample; --count 0 is every mutant, which takes hours

Which modules and which tests, pyproject.toml says under [tool.mutmut]. A mutant that no test tells from the original is
printed as a difference: it is equivalent, or a test is missing. What mutmut does not touch (constants of modules,
properties, other decorated functions) is not measured.
"""

import argparse
import collections
import os
import random
import subprocess
import sys
from pathlib import Path

from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import walk_mutatable_files
from mutmut.utils.format_utils import get_mutant_name
from scipy.stats import binomtest

MUTMUT = str(Path(sys.executable).with_name("mutmut"))
FOUND = ("killed", "timeout", "segfault")


def all_mutants() -> list[str]:
    """The names of all mutants, in an order that depends on the sources alone."""
    return [
        get_mutant_name(path, name)
        for path in sorted(walk_mutatable_files())
        for name in mutate_file_contents(str(path), path.read_text(encoding="utf-8")).mutant_names
    ]


def chosen(names: list[str], count: int, seed: int) -> list[str]:
    """A sample without replacement, every mutant as likely as another; all of them for a count of 0."""
    return sorted(random.Random(seed).sample(names, count)) if 0 < count < len(names) else names


def statuses(names: list[str]) -> dict[str, str]:
    """What mutmut found out about each of the mutants: killed, survived, timeout, no tests and so on."""
    known: dict[str, int | None] = {}
    for path in walk_mutatable_files():
        data = SourceFileMutationData(path=path)
        data.load()
        known |= data.exit_code_by_key
    return {name: status_by_exit_code[known[name]] for name in names}


def report(status: dict[str, str], population: int) -> None:
    """Print the mutants that were not found out, and the score before any of them is called equivalent."""
    for name, ended in status.items():
        if ended not in FOUND:
            subprocess.run([MUTMUT, "show", name], check=False)
    print(", ".join(f"{ended}: {number}" for ended, number in collections.Counter(status.values()).most_common()))
    found = sum(ended in FOUND for ended in status.values())
    interval = binomtest(found, len(status)).proportion_ci(0.95)
    print(f"found out: {found} of {len(status)} ({population} in all): {found / len(status):.1%}", end="")
    print(
        f", 95 % interval {interval.low:.1%} to {interval.high:.1%}, with equivalent mutants counted against the tests"
    )


def main() -> int:
    """Draw the sample, let mutmut run it, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="mutants in the sample; 0: all of them")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--only", default="", help="only mutants whose name contains this, such as privacy.filters")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants tried at a time")
    options = parser.parse_args()
    os.chdir(Path(__file__).parents[1])
    names = [name for name in all_mutants() if options.only in name]
    sample = chosen(names, options.count, options.seed)
    ran = subprocess.run([MUTMUT, "run", "--max-children", str(options.jobs), *sample], check=False)
    if ran.returncode == 0:
        report(statuses(sample), len(names))
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
