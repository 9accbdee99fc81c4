"""Exit with 0 if this container's service answers at CLOISTER_HEALTH: an http(s) address, or tcp://HOST:PORT."""

import os
import socket
import ssl
import sys
import urllib.request
from urllib.parse import urlsplit

AUTHORITY = "/kit/ca.crt"
place = urlsplit(os.environ["CLOISTER_HEALTH"])
try:
    if place.scheme == "tcp":
        socket.create_connection((place.hostname, place.port), timeout=5).close()
    else:
        context = ssl.create_default_context(cafile=AUTHORITY) if place.scheme == "https" else None
        urllib.request.urlopen(place.geturl(), timeout=5, context=context).close()
except OSError as error:
    sys.exit(f"{place.geturl()}: {error}")
