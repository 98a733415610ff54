"""URLs as messages may show them."""

from __future__ import annotations

import re


def redact(url: str) -> str:
    """The URL without user, password, query and fragment; line breaks and control characters escaped."""
    if "://" in url:
        url = re.sub(r"://[^/]*@", "://", url)
        url = re.split(r"[?#]", url, maxsplit=1)[0]
    return url if url.isprintable() else url.encode("unicode_escape").decode("ascii")
