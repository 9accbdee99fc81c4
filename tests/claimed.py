"""Premises of claims that tests make by hand."""

from cloister.privacy.claims.premises import APART

HELD = (APART.known_as("enforced"),)
"""One premise, which holds: a claim has at least one."""
RECORDED = [
    {
        "name": "apart",
        "sentence": APART.sentence,
        "by": "the SuperLink",
        "known": "enforced",
        "standing": False,
    }
]
"""The same in `privacy.json`."""
LINE = "  premises: apart enforced (docs/threat-model.md)"
"""The same in print."""
