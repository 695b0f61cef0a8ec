"""Tiny drafts of every family with traces of a dozen prompts, to learn codes of."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import block_pair
import corpus
import tied_mla
import tied_pair
from by_recipe import draft_of
from draftquant.calibration.linear_inputs.static_scales import calibrated_scales
from draftquant.calibration.passes.draft_inputs import DraftRun
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.traces.target_tables import TargetTables
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.planning.quantization_plan import (
    NOTHING_MEASURED,
    MeasuredInputs,
    Plan,
    make_plan,
)
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.recipes import Recipe, load_recipe
from draftquant.recipes.schema import InputCorrection, NormChoice
from recorded import record_traces
from reference_draft import transformers_in_float64
from safetensors.torch import load_file, save_file

K = {"llama": 3, "mla": 3, "dflash": 7}


@dataclasses.dataclass(frozen=True)
class RoundingPair:
    """A draft and its traces in a folder."""

    folder: Path
    family: str

    @property
    def num_draft_tokens(self) -> int:
        return K[self.family]

    @property
    def draft_folder(self) -> Path:
        return self.folder / "draft"

    @property
    def traces(self) -> TraceFolder:
        return TraceFolder.open(self.folder / "traces")

    def plan(self, recipe: Recipe) -> Plan:
        return make_plan(recipe, draft_of(self.draft_folder))

    def loaded(self, folder: Path | None = None) -> LoadedDraft:
        shared = TargetTables.find(self.folder / "target").shared()
        return load_draft(folder or self.draft_folder, shared=shared)

    def static(self, plan: Plan) -> MeasuredInputs:
        if not plan.recipe.needs_input_scales:
            return NOTHING_MEASURED
        return calibrated_scales(plan, DraftRun(self.loaded(), self.traces, self.num_draft_tokens))


def shared_pair(family: str) -> RoundingPair:
    """Target, draft and traces, which tests read and never change."""
    place = corpus.made(f"rounding-{family}", lambda folder: make_pair(folder, family))
    return RoundingPair(place, family)


def make_pair(folder: Path, family: str, *, num_prompts: int = 12) -> RoundingPair:
    """Write target, draft and traces."""
    folder.mkdir()
    module = block_pair if family == "dflash" else tied_pair
    module.save_target(folder / "target")
    prompts = [
        Prompt(id=f"p{i}", category="a", token_ids=tuple(1 + t % (module.VOCAB - 1) for t in row))
        for i, row in enumerate(tied_pair.prompt_tokens(num_prompts, 6))
    ]
    ids = block_pair.TARGET_LAYER_IDS if family == "dflash" else None
    how = {"max_new_tokens": 20, "aux_layer_ids": ids, "dtype": "float64"}
    with transformers_in_float64():
        traces = record_traces(folder / "target", prompts, folder / "traces", **how)
    if family == "dflash":
        block_pair.save_draft(folder / "draft", folder / "target", traces)
        return RoundingPair(folder, family)
    save = tied_mla.save_mla_draft if family == "mla" else tied_pair.save_draft
    save(folder / "draft", folder / "target")
    # The target's head is so sure that rounding hardly moves its distributions.
    scale_tensors(folder / "draft", {"lm_head.weight": 0.125})
    return RoundingPair(folder, family)


def scale_tensors(
    draft: Path, factors: Mapping[str, float], *, columns: slice | None = None
) -> None:
    """Multiply tensors of a draft, or some of their columns, by powers of two."""
    path = draft / "model.safetensors"
    tensors = load_file(path)
    for name, factor in factors.items():
        tensors[name][..., columns if columns is not None else slice(None)] *= factor
    save_file(tensors, path)


def learned_recipe(
    name: str, *, norms: NormChoice = "kept", input_correction: InputCorrection = "off"
) -> Recipe:
    """A shipped recipe by backend torch, with learned rounding."""
    recipe, changed = load_recipe(name), {"norms": norms, "input_correction": input_correction}
    algorithm = dataclasses.replace(
        recipe.algorithm,
        scale="mse",
        rounding="learned",
        **changed,  # type: ignore[arg-type]
    )
    return dataclasses.replace(recipe, backend="torch", algorithm=algorithm)
