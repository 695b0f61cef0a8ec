"""The state of a canary as a file, by which it survives restarts of itself."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...quantize.files.report_files import write_reports
from ...recipes.decode import encode
from ..errors import WatchError
from .canary import Rule
from .canary_watching import Canary, Servers
from .state_file import OTHER, read_state_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryState:
    """What a canary knows between two readings.

    Attributes:
        of: what is compared, in words and figures: another comparison does not go on with it.
        canary: where it stands.
    """

    format: Literal["draftquant canary"] = "draftquant canary"
    schema_version: Literal[1] = 1
    of: Mapping[str, str]
    canary: Canary


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCanary:
    """The file of the state.

    Attributes:
        path: of the file. of: see `CanaryState`.
    """

    path: Path
    of: Mapping[str, str]

    def write(self, canary: Canary) -> None:
        """Write it whole, in the place of the one before.

        Raises:
            OutputError: it cannot be written.
        """
        text = json.dumps(encode(CanaryState(of=self.of, canary=canary)), allow_nan=False)
        write_reports({self.path: text + "\n"}, overwrite=True)

    def read(self) -> Canary | None:
        """Where the canary stood; None where there is no file yet.

        Raises:
            WatchError: it cannot be read, is something else, or of another canary.
        """
        state = read_state_of(CanaryState, "canary", self.path, self.of)
        if state is None:
            return None
        found = state.canary.comparison
        if (found.blocks > 0) != (found.information > 0):
            what = f"{found.blocks} blocks cannot know {found.information:g}"
            raise WatchError(self.path, what, fix=OTHER)
        return state.canary


def canary_identity(
    golden: str, servers: Servers, model: str | None, rule: Rule
) -> Mapping[str, str]:
    """What is compared, of which a state is.

    Args:
        golden: the document of golden acceptance.
        servers: baseline and candidate.
        model: name of the served target; None = all.
        rule: how they are compared.
    """
    return {
        "golden_sha256": hashlib.sha256(golden.encode()).hexdigest(),
        "baseline": servers.baseline.where,
        "candidate": servers.candidate.where,
        "model": model or "all",
        "max_drop": f"{rule.max_drop:.9g}",
        "confidence": f"{rule.confidence:.9g}",
    }
