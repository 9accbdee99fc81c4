"""Sending JSON to an address that somebody configured."""

from collections.abc import Mapping

import httpx

from cloister.core.errors import FederationError

SECONDS = 10.0
"""For the other side to answer."""


def post(url: str, content: Mapping[str, object]) -> None:
    """Post JSON. Of the answer only the status is read: its body may be anything, and of any length.

    Args:
        url: often a secret, so that no error has it.
        content: to send.

    Raises:
        FederationError: it was not taken.
    """
    try:
        with httpx.stream("POST", url, json=content, timeout=SECONDS) as answer:
            answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise FederationError(f"it was not taken: {type(error).__name__}") from None
