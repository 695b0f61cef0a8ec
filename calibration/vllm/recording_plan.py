"""What is to be recorded by an engine, and all that follows from it before anything starts."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quantize.stored.loading import LoadedDraft
from ...recipes.bounds import AT_LEAST_1
from ..errors import TraceError
from ..prompts.prompt_file import Prompt
from ..recording.decoding import GREEDY, Decoding
from ..recording.prompt_fit import check_prompts
from ..recording.target_shape import TargetShape, chosen_layers, feature_spec
from ..traces.dataset_source import DatasetSource
from ..traces.manifest import FeatureDtype, FeatureSpec, TargetIdentity
from ..traces.too_long import TooLongPrompts
from .engine_arguments import EngineSetup
from .states_file import ExpectedStates


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingPlan:
    """What is to be recorded; checked against the target's config.json before anything starts.

    Attributes:
        target: local folder with config.json; weights may be elsewhere.
        shape: what its config.json says.
        prompts: at least one.
        max_new_tokens: a prompt ends earlier at the target's end-of-text token, unless `decoding`
            ignores it.
        decoding: how tokens are chosen.
        aux_layer_ids: layers whose outputs are recorded, 0-based; None = those of `fuse_with`, else
            EAGLE-3's defaults.
        fuse_with: store this draft's fused features.
        dtype: the target computes in, and features are stored in.
        most_in_flight: prompts that the engine is given at a time.
        too_long: prompts that were left out or cut before, for trace.json.
        dataset: that the prompts were taken out of, for trace.json.
    """

    target: Path
    shape: TargetShape
    prompts: Sequence[Prompt]
    max_new_tokens: int
    decoding: Decoding = GREEDY
    aux_layer_ids: Sequence[int] | None = None
    fuse_with: LoadedDraft | None = None
    dtype: FeatureDtype = "bfloat16"
    most_in_flight: int = 32
    too_long: TooLongPrompts | None = None
    dataset: DatasetSource | None = None

    def __post_init__(self) -> None:
        """Check.

        Raises:
            TraceError: an argument is out of range or does not fit the target.
        """
        for name in ("max_new_tokens", "most_in_flight"):
            AT_LEAST_1.check(TraceError, name, getattr(self, name), fix="give a larger number")
        check_prompts(self.prompts, self.shape, self.max_new_tokens)
        if self.reads_last_state and self.decoding.logprob_spec is None:
            raise TraceError(
                "--logprobs",
                "the draft reads the state after the target's last norm, which engines do"
                " not return: log-probabilities show how the engine computes that norm",
                fix="add --logprobs",
            )

    @property
    def features(self) -> FeatureSpec:
        """What is stored."""
        ids = chosen_layers(self.aux_layer_ids, self.fuse_with, self.shape)
        return feature_spec(self.shape, ids, self.fuse_with, self.dtype)

    @property
    def reads_last_state(self) -> bool:
        """Whether the draft reads the state behind the norm before the target's head."""
        return self.fuse_with is not None and not self.fuse_with.geometry.reads_layers

    @property
    def states(self) -> ExpectedStates:
        """What the engine writes."""
        return ExpectedStates(
            aux_layer_ids=self.features.aux_layer_ids,
            width=self.shape.hidden_size,
            dtype=self.dtype,
        )

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt with its continuation."""
        return max(len(prompt.token_ids) for prompt in self.prompts) + self.max_new_tokens

    def setup(self, folder: Path, given: Mapping[str, object]) -> EngineSetup:
        """What an engine must be started with; see `EngineSetup`."""
        return EngineSetup(
            target=self.target,
            aux_layer_ids=self.features.aux_layer_ids,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            num_top_logprobs=self.decoding.num_top_logprobs,
            folder=folder,
            plain_latent_rope=self.shape.plain_latent_rope,
            given=given,
        )

    def as_json(self, identity: TargetIdentity) -> dict[str, Any]:
        """What must be equal where a recording goes on. How the engine runs may change."""
        prompts = hashlib.sha256()
        for prompt in self.prompts:
            prompts.update(f"{prompt.id}\0{prompt.category}\0{prompt.token_ids}\0".encode())
        return {
            "target": dataclasses.asdict(identity),
            "num_prompts": len(self.prompts),
            "prompts_sha256": prompts.hexdigest(),
            "max_new_tokens": self.max_new_tokens,
            "decoding": dataclasses.asdict(self.decoding),
            "aux_layer_ids": list(self.features.aux_layer_ids),
            "dtype": self.dtype,
        }
