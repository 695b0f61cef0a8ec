"""Alarms sent to an address of the user's; what goes wrong there never ends a watch."""

import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from ..errors import WatchError

_ATTEMPTS = 3
_SECONDS = 10.0
"""Of an attempt."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """An address that takes JSON.

    Attributes:
        url: may hold a secret, and is shown without its path.
    """

    url: str

    def check(self) -> None:
        """Refuse what is no address.

        Raises:
            WatchError: it is none.
        """
        try:
            parts = urllib.parse.urlsplit(self.url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:
            fits = False
        if not fits:
            raise WatchError(
                "--webhook",
                "expected an address that begins with http:// or https:// and names a host, got"
                f" {len(self.url)} characters that do not (they may be a secret)",
                fix="give http://HOST/PATH or https://HOST/PATH",
            )

    @property
    def host(self) -> str:
        """What of it may be shown."""
        return urllib.parse.urlsplit(self.url).hostname or ""

    def send(
        self, body: Mapping[str, Any], wait: Callable[[float], None] = time.sleep
    ) -> str | None:
        """Post an object, three times at most.

        Args:
            body: as JSON can hold it.
            wait: before another attempt, so many seconds.

        Returns:
            None where it was taken, else why not.
        """
        problem = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                wait(2.0**attempt)
            try:
                with httpx2.stream("POST", self.url, json=dict(body), timeout=_SECONDS) as answer:
                    if answer.is_success:  # what else it says may never end
                        return None
                    problem = f"status {answer.status_code}"
            except (httpx2.HTTPError, httpx2.InvalidURL) as exc:
                problem = type(exc).__name__
        return f"the webhook at {self.host} did not take the alarm, {_ATTEMPTS} attempts: {problem}"
