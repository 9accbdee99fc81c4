"""Audit of a run: every audit that fits it, in sequence."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from cloister.audits.finding import Skipped
from cloister.audits.report import Audited, earlier
from cloister.audits.subject import FinishedRun
from cloister.audits.table import AUDITS, Audit, Effort


def audit(path: Path, effort: Effort, only: Sequence[str] = ()) -> Audited:
    """Run every fitting audit of a run, and write `audit.json` after each of them.

    Earlier findings of audits that do not run this time are kept.

    Args:
        path: of the run directory.
        effort: limits of the audits.
        only: names of audits; empty: all of them.

    Raises:
        ConfigError: the path is no run directory, its run has not ended, or its `audit.json` is malformed.
        PluginError: an audit is unknown.
        DataError: the data of the run's task is not on this machine.
    """
    run = FinishedRun.read(path)
    if not run.config.privacy.server.hypotheses and run.has_model:
        run.model()  # raises for a broken model before the first attack
    found = {finding.name: finding for finding in earlier(run.path, run.privacy)}
    chosen = only or AUDITS.names()
    others = [name for name in AUDITS.names() if name not in (*chosen, *found)]
    skipped = [Skipped(name, "it was not asked for") for name in others]
    for one in [cast(Audit, AUDITS.load(name)) for name in chosen]:
        if why := one.misfit(run):
            skipped.append(Skipped(one.name, why))
            continue
        with effort.progress.audit(one.name):
            made = one.conduct(run, effort)
        found[one.name] = replace(made, seconds=effort.progress.seconds)
        Audited(run.path, run.privacy, tuple(found.values()), tuple(skipped)).write()
    audited = Audited(run.path, run.privacy, tuple(found.values()), tuple(skipped))
    audited.write()
    return audited
