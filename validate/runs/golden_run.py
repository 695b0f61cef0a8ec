"""`golden`, whole: acceptance as figures, as a profile, and as load tests simulate it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from ...quantize.files.report_files import write_reports
from ...recipes.brief import Brief
from ...recipes.errors import GoldenError
from ..golden.profile import Profile, profile_document, read_profile
from ..golden.synthetic import simulation
from .serving_asked import GoldenRun


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GoldenText(Brief):
    """What was made from golden acceptance, or from a speculation profile.

    Attributes:
        profile: the figures that follow from it.
        text: what was asked for; "" = nothing was.
        notes: what to know about it.
        out: the file that was written, if one was asked for.
    """

    profile: Profile
    text: str
    notes: tuple[str, ...]
    out: Path | None

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "acceptance length": f"acceptance length {self.profile.mean:.4f}",
            "K": self.profile.num_draft_tokens,
            "written": self.out,
        }


def golden_made(asked: GoldenRun) -> GoldenText:
    """Read golden acceptance or a profile, and turn it into the requested form."""
    profile = read_profile(Path(asked.golden))
    text, notes = _made(asked, profile)
    out = None if asked.out is None else Path(asked.out)
    if out is not None:
        write_reports({out: text}, overwrite=asked.overwrite)
    return GoldenText(profile=profile, text=text, notes=notes, out=out)


def _made(asked: GoldenRun, profile: Profile) -> tuple[str, tuple[str, ...]]:
    if asked.to == "profile":
        return profile_document(profile), ()
    categories = profile.per_category or {}
    if asked.category and asked.category not in categories:
        known = ", ".join(categories) or "none"
        raise GoldenError(asked.golden, f"has no category {asked.category!r}, but {known}",
                          fix="leave --category out for all prompts")  # fmt: skip
    if asked.to is None:
        return "", ()
    accepted = categories[asked.category] if asked.category else profile
    simulated = simulation(accepted, profile.num_draft_tokens, asked.to)
    if simulated is None:
        raise GoldenError(
            asked.golden,
            f"has no rates by position, which {asked.to} simulates",
            fix="--for sglang or tensorrt-llm, which take the mean; or measure golden acceptance",
        )
    line, notes = simulated
    return f"{line}\n", notes
