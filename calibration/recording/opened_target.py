"""`OpenedTarget`: a loaded target with its hooks, and what the traces of its prompts will be."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from ...quantize.stored.loading import LoadedDraft
from ..traces.manifest import FeatureDtype, FeatureSpec, FeatureStorage, TargetIdentity
from ..traces.prompt_trace import FEATURE_DTYPES
from .kept_rows import Fuse
from .recorded_target import RecordedTarget
from .target_model import Placement, decoder_layers, loaded_target, shape_of
from .target_shape import chosen_layers, feature_spec, target_identity


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedTarget:
    """A target that is ready to continue prompts.

    Attributes:
        recorded: the target with its hooks.
        identity: name and hashes, for trace.json.
        features: what is stored of its hidden states.
        fuse: made of the features of each prompt; None = they stay as they are.
    """

    recorded: RecordedTarget
    identity: TargetIdentity
    features: FeatureSpec
    fuse: Fuse | None


@contextmanager
def opened_target(
    target: Path,
    *,
    aux_layer_ids: Sequence[int] | None,
    fuse_with: LoadedDraft | None,
    dtype: FeatureDtype,
    stored: FeatureDtype | None,
    placement: Placement,
    storage: FeatureStorage | None,
    beside: Path,
) -> Iterator[OpenedTarget]:
    """Load a target and hook its layers; leaving the block removes the hooks.

    Args:
        target: as of `record_traces`, also the next five and `storage`.
        placement: where the target runs.
        beside: see `loaded_target`.

    Raises:
        TraceError: the target cannot be loaded or placed, or an argument does not fit it.
    """
    with loaded_target(target, FEATURE_DTYPES[dtype][0], placement, beside=beside) as model:
        layers = decoder_layers(model, target)
        shape = shape_of(model.config.get_text_config(), len(layers))
        identity = target_identity(target, shape)
        ids = chosen_layers(aux_layer_ids, fuse_with, shape)
        computed = feature_spec(shape, ids, fuse_with, dtype)
        last_state = fuse_with is not None and not fuse_with.geometry.reads_layers
        with RecordedTarget(model, layers, ids, last_state=last_state) as recorded:
            yield OpenedTarget(
                recorded=recorded,
                identity=identity,
                features=dataclasses.replace(computed, dtype=stored or dtype, storage=storage),
                fuse=None if fuse_with is None else partial(_fused, fuse_with),
            )


def _fused(draft: LoadedDraft, features: Tensor) -> Tensor:
    """What the draft's fc makes of the features [n, width] of a prompt, where it is."""
    return draft.forward.fuse(features[None].to(draft.device))[0]
