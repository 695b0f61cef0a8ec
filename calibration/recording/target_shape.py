"""What to record of a target, and what a recorder must know about it before it runs."""

import dataclasses
import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quantize.drafts.config_reader import with_text_config
from ...quantize.drafts.rope import declared
from ...quantize.files.checkpoint import CONFIG_FILE, read_json_object
from ...quantize.files.hub import no_target
from ...quantize.files.staging import check_output
from ...quantize.pairing.features import OTHER_TARGET, misfits
from ...quantize.stored.loading import LoadedDraft
from ...recipes.errors import TraceError, short, visible
from ..passes.draft_inputs import default_aux_layer_ids
from ..prompts.prompt_file import Prompt
from ..traces import files_raise
from ..traces.manifest import (
    DatasetSource,
    FeatureDtype,
    FeatureSpec,
    FeatureStorage,
    TargetIdentity,
    TooLong,
    TooLongPrompts,
)
from ..traces.prompt_trace import FEATURE_DTYPES
from ..traces.stored_features import check_storage
from ..traces.target_tables import TargetTables
from ..traces.trace_folder import file_sha256
from ..traces.writer import TraceWriter, trace_output
from .decoding import GREEDY, Decoding

_TEXT_SECTIONS = ("text_config", "llm_config")  # of multimodal targets
_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5 and 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """Sizes of a target; `max_positions`: of prompt and continuation, None = not given.

    `plain_latent_rope`: it has MLA whose rotary angles are not scaled.
    """

    num_layers: int
    vocab_size: int
    hidden_size: int
    max_positions: int | None
    plain_latent_rope: bool = False

    @classmethod
    def read(cls, target: Path) -> "TargetShape":
        """Read from config.json alone: remote code and weights are not needed."""
        path, config = target / CONFIG_FILE, config_of(target)
        sections = (config.get(name) for name in _TEXT_SECTIONS)
        text = next((section for section in sections if isinstance(section, Mapping)), config)
        longest = text.get("max_position_embeddings")
        return cls(
            num_layers=_size(text, "num_hidden_layers", path),
            vocab_size=_size(text, "vocab_size", path),
            hidden_size=_size(text, "hidden_size", path),
            max_positions=longest if type(longest) is int else None,
            plain_latent_rope="kv_lora_rank" in text
            and declared(text).keys["rope_type"] == "default",
        )


def config_of(target: Path) -> Mapping[str, Any]:
    """A target's config.json; what is wrong with it is a TraceError."""
    with files_raise(TraceError):
        return read_json_object(target / CONFIG_FILE, no_target(target))


def has_bf16_weights(target: Path) -> bool:
    """Whether the target's config.json says that it is stored, and so served, in BF16."""
    config = config_of(target)
    sections = [config, *(config.get(name) for name in _TEXT_SECTIONS)]
    dtypes = [s.get(key) for s in sections if isinstance(s, Mapping) for key in _DTYPE_KEYS]
    return "bfloat16" in dtypes


def _size(config: Mapping[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise TraceError(path, f"{key}: expected a whole number above 0, got {short(value)}",
                         fix="give a causal language model")  # fmt: skip
    return value


def target_identity(
    target: Path, shape: TargetShape, files: Sequence[Path] | None = None
) -> TargetIdentity:
    """The target's name and hashes; reads all of its weights, if they exist, or `files`."""
    files = sorted(target.glob("*.safetensors")) if files is None else files
    weights = hashlib.sha256()
    for path in files:
        weights.update(f"{path.name} {file_sha256(path)}\n".encode())
    return TargetIdentity(
        name=visible(target.resolve().name),
        config_sha256=file_sha256(target / CONFIG_FILE),
        weights_sha256=weights.hexdigest() if files else None,
        num_layers=shape.num_layers,
        vocab_size=shape.vocab_size,
    )


def end_token_ids(target: Path) -> frozenset[int]:
    """Tokens that end a text of the target, by generation_config.json, or else config.json."""
    generation = target / "generation_config.json"
    settings = read_json_object(generation, no_target(target)) if generation.is_file() else {}
    token_ids = settings.get("eos_token_id")
    if token_ids is None:
        config = with_text_config(read_json_object(target / CONFIG_FILE, no_target(target)))
        token_ids = config.get("eos_token_id")
    ids = token_ids if isinstance(token_ids, list) else [token_ids]
    return frozenset(token for token in ids if type(token) is int and token >= 0)


def check_draft_fits(
    name: str, geometry: Any, shape: TargetShape, asked: Sequence[int] | None
) -> None:
    """Refuse a target that cannot feed a draft, by their configs alone; None = its own layers."""
    sizes = shape.num_layers, shape.vocab_size, shape.hidden_size
    for _, misfit in misfits(geometry, *sizes, asked):
        fix = f"{OTHER_TARGET}, or leave --draft out"
        raise TraceError(f"draft {name}", misfit, fix=fix)


def chosen_layers(
    asked: Sequence[int] | None, draft: LoadedDraft | None, shape: TargetShape
) -> tuple[int, ...]:
    """The layers to record: those requested, or the draft's, or EAGLE-3's defaults.

    For a draft without fc the last one, after which comes the state that it reads.
    """
    if draft is not None and not draft.geometry.reads_features:
        raise TraceError(
            f"draft {draft.name}",
            "it reads tokens only, so there are no features to fuse",
            fix="leave --fused out: all traces fit this draft",
        )
    if draft is not None and not draft.geometry.reads_layers:
        if asked is not None:
            what = f"the draft {draft.name} reads the target's last hidden state, and no layers"
            raise TraceError("aux layers", what, fix="leave --aux-layers out")
        ids: tuple[int, ...] = (shape.num_layers - 1,)
    elif asked is not None:
        ids = tuple(asked)
    elif draft is not None and draft.geometry.aux_layer_ids:
        ids = tuple(draft.geometry.aux_layer_ids)
    else:
        ids = default_aux_layer_ids(shape.num_layers)
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= shape.num_layers:
        what = f"expected ascending ids in [0, {shape.num_layers}), got {list(ids)}"
        fix = "give 0-based layers of this target: their outputs are recorded"
        raise TraceError("aux layers", what, fix=fix)
    return ids


def feature_spec(
    shape: TargetShape, ids: tuple[int, ...], draft: LoadedDraft | None, dtype: FeatureDtype
) -> FeatureSpec:
    """What is stored of these layers: their outputs, or the output of the draft's fc on them.

    For a draft without fc it is the target's last hidden state, after its final norm.
    """
    width = len(ids) * shape.hidden_size
    if draft is None:
        return FeatureSpec(
            kind="aux", width=width, dtype=dtype, aux_layer_ids=ids, fusion_sha256=None
        )
    geometry = draft.geometry
    reads = geometry.num_aux_layers * geometry.target_hidden_size
    if reads != width or draft.dtype != FEATURE_DTYPES[dtype][0]:
        who = "its fc" if draft.geometry.reads_layers else "it"
        raise TraceError(
            f"draft {draft.name}",
            f"{who} reads {reads} values in {draft.dtype}, but the target gives {width} in {dtype}",
            fix="load the draft in the dtype of the recording, and give the draft of this target",
        )
    return FeatureSpec(
        kind="fused",
        width=geometry.hidden_size,
        dtype=dtype,
        aux_layer_ids=ids,
        fusion_sha256=draft.fusion_sha256,
    )


_MOST_NAMED = 20  # prompts that one error names


def fitted_prompts(
    prompts: Sequence[Prompt],
    shape: TargetShape,
    max_new_tokens: int,
    too_long: TooLong = "error",
    where: object = "prompts",
) -> tuple[tuple[Prompt, ...], TooLongPrompts | None]:
    """Refuse prompts that the target cannot continue, or leave out or cut those that are too long.

    Returns at least one, and which are too long; None where none is. "truncate" keeps the last
    tokens of a prompt, as engines do that truncate prompts.
    """
    if not prompts:
        raise TraceError(where, "expected at least one prompt", fix="give a prompt file")
    room = _room(shape, max_new_tokens)
    longer = [prompt for prompt in prompts if room is not None and len(prompt.token_ids) > room]
    foreign = [p for p in prompts if not p.token_ids or max(p.token_ids) >= shape.vocab_size]
    problems = [f"prompt {p.id}: it has token ids beyond the vocabulary" for p in foreign]
    if too_long == "error":
        problems += [
            f"prompt {p.id}: {len(p.token_ids) + max_new_tokens} tokens, prompt and continuation"
            for p in longer
        ]
    if problems:
        raise _misfits(where, problems, len(prompts), shape, foreign=bool(foreign))
    ids = tuple(prompt.id for prompt in longer)
    if not ids:
        return tuple(prompts), None
    if too_long == "truncate":
        assert room is not None  # some prompt is longer
        cut = (dataclasses.replace(p, token_ids=p.token_ids[-room:]) for p in prompts)
        return tuple(cut), TooLongPrompts(truncated=ids)
    left = tuple(prompt for prompt in prompts if prompt.id not in ids)
    if not left:
        what = f"all {len(prompts)} are longer than {room} tokens and would be left out"
        raise TraceError(where, what, fix="give shorter prompts, or cut them: --too-long truncate")
    return left, TooLongPrompts(skipped=ids)


def _room(shape: TargetShape, max_new_tokens: int) -> int | None:
    if shape.max_positions is None:
        return None
    room = shape.max_positions - max_new_tokens
    if room < 1:
        where = "--max-new-tokens"
        raise TraceError(
            where,
            f"{max_new_tokens} new tokens leave no room for a prompt: the target has"
            f" {shape.max_positions} positions",
            fix=f"give at most {shape.max_positions - 1}",
        )
    return room


def _misfits(
    where: object, problems: Sequence[str], num_prompts: int, shape: TargetShape, *, foreign: bool
) -> TraceError:
    more = len(problems) - _MOST_NAMED
    limits = f"token ids below {shape.vocab_size}"
    if shape.max_positions is not None:
        limits += f" and at most {shape.max_positions} tokens with the continuation"
    return TraceError(
        where,
        f"{len(problems)} of {num_prompts} do not fit the target, expected {limits}",
        details=[*problems[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])],
        fix="tokenize the prompts with this target's tokenizer"
        if foreign
        else "leave them out (--too-long skip), cut them (--too-long truncate), or lower"
        " --max-new-tokens",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingPlan:
    """What is recorded of a target, whoever runs it.

    `fuse_with` computes in `dtype`; its fused features are narrower, and only of use for drafts
    with the same fc. With `table_ids`, the target's embedding of these and of recorded tokens is
    carried, and its head.
    """

    target: Path
    shape: TargetShape
    prompts: Sequence[Prompt]
    max_new_tokens: int
    decoding: Decoding = GREEDY
    aux_layer_ids: Sequence[int] | None = None  # ascending; None = the draft's, or [1, L/2-1, L-4]
    fuse_with: LoadedDraft | None = None
    dtype: FeatureDtype = "float32"  # in which the target computes
    stored: FeatureDtype | None = None  # to which features are rounded; None = the same
    storage: FeatureStorage | None = None
    table_ids: Collection[int] | None = None
    too_long: TooLongPrompts | None = None
    dataset: DatasetSource | None = None
    batch_size: int = 32  # most prompts that run together

    @property
    def features(self) -> FeatureSpec:
        """What is stored."""
        ids = chosen_layers(self.aux_layer_ids, self.fuse_with, self.shape)
        computed = feature_spec(self.shape, ids, self.fuse_with, self.dtype)
        return dataclasses.replace(computed, dtype=self.stored or self.dtype, storage=self.storage)

    @property
    def reads_last_state(self) -> bool:
        """Whether the draft reads the state after the norm before the target's head."""
        return self.fuse_with is not None and not self.fuse_with.geometry.reads_layers

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt with its continuation."""
        return max(len(prompt.token_ids) for prompt in self.prompts) + self.max_new_tokens

    def check(self, out: Path) -> None:
        """Refuse what cannot be recorded into a new folder, before the target runs."""
        check_output(out)
        check_storage(self.storage)
        if self.table_ids is not None:
            TargetTables.find(self.target)
        fitted_prompts(self.prompts, self.shape, self.max_new_tokens)

    def output(
        self,
        out: Path,
        identity: TargetIdentity,
        features: FeatureSpec,
        recorded_by: str | None = None,
    ) -> AbstractContextManager[TraceWriter]:
        """The trace folder to write recorded prompts into."""
        head = dataclasses.replace(
            self.decoding.manifest(identity, features),
            recorded_by=recorded_by,
            too_long=self.too_long,
            datasets=(self.dataset,) if self.dataset else None,
        )
        tables = None if self.table_ids is None else TargetTables.find(self.target)
        return trace_output(out, head, tables=tables, table_ids=self.table_ids or ())
