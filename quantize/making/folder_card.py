"""What a model card says of a draft from its folder or plan alone, and the shortest card.

The card has no hash, measurement or folder name, so that equal runs give equal files.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...recipes.packages import package_version
from ...recipes.schema import Recipe
from ..drafts.unknown_family import UnknownFamily
from ..files.card_text import (
    CARD_FILE,
    around,
    card_text,
    code,
    inherited,
    is_ours,
    prose,
    read_card,
    table,
    without_ours,
)
from ..files.hub import DraftSource
from ..files.provenance import CutProvenance, Method, Provenance, QuantizedProvenance
from ..planning.quantization_plan import Plan
from ..stored.stored_draft import StoredDraft

_NO_FAMILY = (
    "draftquant has no maths of this kind of draft (family unknown): tensors have their roles by"
    " rules for names, and `draftquant gate --measured` on two servers takes the place of traces."
)
Making = QuantizedProvenance | CutProvenance


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a folder is: its roles with their numbers of quantized linears and of kept tensors."""

    family: str
    hub_id: str | None
    recipe: Recipe | None
    bytes_before: int
    bytes_after: int
    quantized: Mapping[str, int]
    kept: Mapping[str, int]
    num_balanced: int = 0
    num_learned: int = 0
    vocabulary: str | None = None
    inherited: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_plan(cls, plan: Plan, source: DraftSource, card: str, method: Method) -> "CardFacts":
        """From a plan, and the source's card."""
        changed = {step.row.tensor.name for step in plan.quantized} | method.changed_norms
        rows = [row for row in plan.remaining.rows if row.tensor.name not in changed]
        return cls(
            family=plan.draft.family.name,
            hub_id=source.hub_id,
            recipe=plan.recipe,
            bytes_before=plan.bytes_before,
            bytes_after=plan.bytes_after,
            quantized=Counter(step.row.role for step in plan.quantized),
            kept=Counter(row.role for row in rows),
            num_balanced=len(method.balanced),
            num_learned=len(method.learned_norms),
            inherited=inherited(card),
        )

    @classmethod
    def of_folder(cls, stored: StoredDraft, record: Making) -> "CardFacts":
        """From a folder and its card."""
        made, before = record.tensor_digests, record.source.tensor_digests
        whole = record.source if isinstance(record, QuantizedProvenance) else record.cuts[0].source
        rows = stored.draft.rows
        return cls(
            family=whole.family,
            hub_id=whole.hub_id,
            recipe=getattr(record, "recipe", None),
            bytes_before=record.tensor_bytes.before,
            bytes_after=record.tensor_bytes.after,
            quantized=Counter(row.role for row in rows if stored.is_quantized(row)),
            kept=Counter(
                row.role for row in rows if made.get(row.tensor.name) == before.get(row.tensor.name)
            ),
            num_balanced=len(getattr(record, "balanced", ())),
            num_learned=len(getattr(record, "learned_norms", ())),
            vocabulary=str(record.cuts[-1]) if record.cuts else None,
            inherited=inherited(read_card(stored.checkpoint.folder)),
        )

    @property
    def title(self) -> str:
        """The heading of the card."""
        if self.hub_id is None:
            return f"# A {self.kind} {prose(self.family)} draft"
        return f"# {prose(self.hub_id.rpartition('/')[2])}, {self.kind}"

    @property
    def kind(self) -> str:
        """What was done, in a word."""
        return "quantized" if self.recipe else "cut"

    def front_matter(
        self, *, base_model: str | None = None, license: str | None = None
    ) -> dict[str, Any]:
        """Keys for the Hub; given ones take precedence."""
        base, keys = base_model or self.hub_id, dict(self.inherited)
        if license is not None:
            keys = {key: keys[key] for key in keys if not key.startswith("license")}
        return {
            "license": license or keys.get("license"),
            "license_name": keys.get("license_name"),
            "license_link": keys.get("license_link"),
            "language": keys.get("language"),
            "base_model": base,
            "base_model_relation": "quantized" if base and self.recipe else None,
            "pipeline_tag": keys.get("pipeline_tag"),
            "library_name": keys.get("library_name", "draftquant"),
            "tags": ["speculative-decoding", "draft-model", self.kind, "draftquant", self.family,
                     *([self.recipe.layout] if self.recipe else [])],
        }  # fmt: skip

    def scheme(self) -> str:
        """What was made, and from which tensors."""
        saved = 1 - self.bytes_after / self.bytes_before if self.bytes_before else 0.0
        counts = {"divided, exactly": self.num_balanced, "learned": self.num_learned}
        changed = [(how, _counted({"norm": n}, "tensor")) for how, n in counts.items() if n]
        return table(
            ("", ""),
            [
                *(_formats(self.recipe) if self.recipe else ()),
                ("tensors", f"{self.bytes_before:,} → {self.bytes_after:,} bytes ({-saved:+.1%})"),
                *([("quantized", _counted(self.quantized, "linear"))] if self.recipe else ()),
                ("kept byte for byte", _counted(self.kept, "tensor")),
                *changed,
                *([("cut", prose(self.vocabulary))] if self.vocabulary else ()),
            ],
        )


def _formats(recipe: Recipe) -> list[tuple[str, str]]:
    return [
        ("recipe", code(recipe.name)),
        ("weights", prose(recipe.weights)),
        ("activations", prose(recipe.activations or "not quantized")),
        *((f"format {i}", prose(each)) for i, each in enumerate(recipe.formats[1:], 2)),
        ("scales and rounding", prose(recipe.algorithm)),
        ("stored as", prose(recipe.layout)),
    ]


def least_card(facts: CardFacts, *, before: str, behind: str) -> str:
    """What this folder is, and what is not known."""
    return card_text(
        facts.front_matter(),
        [
            facts.title,
            "A draft model of speculative decoding: it proposes tokens that a target model accepts"
            " or rejects. It is of no use alone, and of none with another target.",
            facts.scheme(),
            *([_NO_FAMILY] if facts.family == UnknownFamily.name else []),
            f"Made and verified byte by byte by draftquant {prose(package_version('draftquant'))};"
            " `draftquant verify FOLDER --against SOURCE` does it again, and `draftquant.json` has"
            " the sha256 of every tensor.",
            "How many tokens are accepted was **not measured** when this was written:"
            " `draftquant gate SOURCE FOLDER --traces T --report G.json` measures it, and"
            " `draftquant card FOLDER --gate G.json` says it here.",
        ],
        before=before,
        behind=behind,
    )


def renewed_card(
    stored: StoredDraft,
    record: Provenance | None,
    recipe: Recipe,
    bytes_after: int,
    *,
    vocabulary: str | None = None,
) -> dict[str, str]:
    """README.md of a folder written again, unless others wrote it."""
    card = read_card(stored.checkpoint.folder)
    if not is_ours(card) or not isinstance(record, QuantizedProvenance):
        return {}
    facts = replace(CardFacts.of_folder(stored, record), recipe=recipe, bytes_after=bytes_after)
    facts = replace(facts, vocabulary=vocabulary or facts.vocabulary)
    before, behind = around(card)
    return {CARD_FILE: least_card(facts, before=before, behind=behind)}


def plain_card(folder: Path, files: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Side files of a dequantized folder, and what is left of README.md."""
    card = read_card(folder)
    if not is_ours(card):
        return list(files), {}
    left = without_ours(card)
    return [file for file in files if file != CARD_FILE], {CARD_FILE: left} if left else {}


def _counted(by_role: Mapping[str, int], what: str) -> str:
    total = sum(by_role.values())
    roles = ", ".join(f"{prose(role)} {count}" for role, count in sorted(by_role.items()))
    return f"{total} {what}{'' if total == 1 else 's'}: {roles}" if total else f"no {what}"
