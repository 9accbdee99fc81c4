"""Sending JSON to a configured address."""

from collections.abc import Mapping

import httpx

from cloister.utils.errors import FederationError

SECONDS = 10.0
"""Timeout for the answer."""


def post(url: str, content: Mapping[str, object]) -> None:
    """Post JSON, and read only the status of the answer.

    The body of the answer may be of any kind and length.

    Args:
        url: often a secret, so that errors omit it.
        content: to send.

    Raises:
        FederationError: the other side did not accept it.
    """
    try:
        with httpx.stream("POST", url, json=content, timeout=SECONDS) as answer:
            answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise FederationError(f"it was not taken: {type(error).__name__}") from None
