"""Entry for OpenDP's registry of deployments, from a finished run.

python registry_entry.py RUN ENTRY.toml

It needs PyYAML, and writes `registry.yaml`, a draft, into the run directory. ENTRY has what only the operator can
state; see `Entry`.
Statements that `cloister report --statements` was given are in the draft too.
"""

import re
import sys
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, Field

from cloister.config.io import Section, read_toml
from cloister.privacy.claims.claim import Claim, DpSgdClaim, Figure, LocalClaim
from cloister.privacy.claims.render import limits_of, protected
from cloister.privacy.claims.to_json import NEIGHBOURS
from cloister.server.reports.html.compliance import claims_of, figures_of, questions
from cloister.server.reports.html.data import Facts, Statements, kept
from cloister.utils.errors import CloisterError, ConfigError
from cloister.utils.text import at_most, clean

REGISTRY = "registry.yaml"
Line = Annotated[str, Field(min_length=1, max_length=2000)]


def _day(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError(f"publication-date = {text!r} must be a day, as in '2026-01-31'") from None


class Entry(Section):
    """Fields of an entry that only the operator can state.

    Args:
        name: of the model as it is published.
        curators: publishers of the model.
        authors: of this entry.
        description: of the model, in a sentence or two.
        intended_use: of the model.
        region: of the data, or of the applicable law.
        publication_date: of the model, YYYY-MM-DD.
        sector: the industry of the data; empty: not stated.
        data_source: whether new data arrives over time.
        sources: links and papers; empty: none.
    """

    name: Line
    curators: Annotated[list[Line], Field(min_length=1)]
    authors: Annotated[list[Line], Field(min_length=1)]
    description: Line
    intended_use: Line
    region: Line
    publication_date: Annotated[str, AfterValidator(_day)]
    sector: Literal["", "Technology", "Healthcare", "Education", "Government", "Energy", "Finance"] = ""
    data_source: Literal["Static", "Dynamic"] = "Static"
    sources: Annotated[str, Field(max_length=2000)] = ""


def write_entry(directory: Path, entry: Entry, statements: Statements) -> Path:
    """Write `registry.yaml` into a run directory.

    Args:
        directory: of a run that has ended.
        entry: fields stated by the operator.
        statements: of the operator, as on the officer's page.

    Raises:
        ConfigError: the run has no sound claim, or the directory cannot be read.
    """
    facts = Facts.read(directory)
    path = directory / REGISTRY
    text = yaml.safe_dump(entry_of(facts, entry, statements), sort_keys=False, allow_unicode=True, width=10**9)
    path.write_text(text, encoding="utf-8")
    return path


def entry_of(facts: Facts, entry: Entry, statements: Statements) -> dict[str, object]:
    """Return the entry in the form of the registry's schema.

    Args:
        facts: of the run.
        entry: fields stated by the operator.
        statements: of the operator.

    Raises:
        ConfigError: the run has no sound claim with an ε.
    """
    claim, figure = _strongest(facts)
    told = {}  # the answers of the officer's page in one line each, or the open questions
    for question in questions(facts, statements):
        stated = f"The operator states: {question.stated}" if question.stated else f"Not stated: {question.open}."
        told[question.key] = clean(" ".join([*question.facts, stated]))
    every = [
        f"ε = {at_most(each.epsilon, 6)} at δ = {at_most(each.delta or 0.0)} for one {claim.word_for(each.unit)}, "
        f"{about or each.scope}: against {each.adversary}"
        for about, each in figures_of(claim)
    ]
    left = [facts.statement.claim.unprotected if facts.statement else ()]
    left += [each.unprotected for each in claims_of(facts)]
    sound = [each for each in claims_of(facts) if each.is_guaranteed]
    of_server = [each for each in sound if not isinstance(each, DpSgdClaim | LocalClaim)]
    where = "Noise is added on a server that is trusted." if of_server else "Noise is added on the clients."
    if any(each.is_against_server for each in of_server):
        where = "Noise is added on the clients, in shares: the server learns a sum with noise, and no single update."
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    code = f"Versions: {versions}. SHA-256 of the configuration: {facts.digest}."
    deployment = {
        "basic": {
            "name": entry.name,
            "data_curators": entry.curators,
            "intended_use": entry.intended_use,
            "data_product_type": "Machine learning model",
            "data_product_region": entry.region,
            "description": entry.description,
            "publication_date": entry.publication_date,
            **({"data_product_sector": entry.sector} if entry.sector else {}),
        },
        "dp_variant": {
            "variant_name": "Approximate DP" if figure.delta else "Pure DP",
            "data_domain": told["collection"],
            "unprotected_quantities": _lines(list(dict.fromkeys(item for items in left for item in items))),
        },
        "privacy_loss": {
            "privacy_unit": protected(claim, figure),
            "privacy_unit_details": f"{figure.neighbours or NEIGHBOURS} ({figure.relation}). {told['unit']}",
            "privacy_parameters": {"epsilon": figure.epsilon, "delta": figure.delta or 0.0},
            "privacy_parameters_details": _lines([*every, *limits_of(claim)]),
        },
        "deployment_model": {
            "model_name": "Federated",
            "model_name_details": where,
            "actors": told["trust"],
            "release_type": "Many releases",
            "release_type_details": "The model of every round counts as released. " + told["composition"],
            "data_source_type": entry.data_source,
            "access_type": "Non-interactive",
            "access_type_details": told["access"],
        },
        "accounting": {
            "post_processing": "The strategy and its server optimizer act on what the mechanism released.",
            "composition": told["composition"],
        },
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": told["mechanism"],
            "mechanisms": _lines([told["mechanism"], told["implementation"], code]),
            "justification": told["parameters"],
        },
        "administrative": {
            **({"sources": clean(entry.sources)} if entry.sources else {}),
            "registry_authors": entry.authors,
        },
    }
    words = f"{entry.name} {entry.curators[0]} {entry.publication_date[:4]}".lower()
    slug = re.sub(r"[^a-z0-9]+", "-", words).strip("-")
    return {"url_slug": slug, "status": "Draft", "tier": 3, "deployment": deployment}


def _strongest(facts: Facts) -> tuple[Claim, Figure]:
    """Return the first sound claim, and its largest ε for its unit.

    The server's claim comes before the clients'.
    """
    for claim in claims_of(facts):
        found = [figure for _, figure in figures_of(claim) if figure.unit == claim.unit]
        if claim.is_guaranteed and found:
            return claim, max(found, key=lambda figure: figure.bound)
    raise ConfigError(
        f"{facts.name} has no sound claim with an ε: the registry is for deployments with a guarantee, so no entry is "
        "written"
    )


def _lines(items: list[str]) -> str:
    return clean(" · ".join(items)) or "None are known."


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python registry_entry.py RUN ENTRY.toml")
    run, stated = map(Path, sys.argv[1:])
    try:
        print(write_entry(run, read_toml(Entry, stated, str(stated)), kept(run)))
    except CloisterError as error:
        raise SystemExit(str(error)) from None
