"""What vLLM must be started with so that it records: as arguments of `vllm.LLM`, or as a command.

The hidden states are kept by vLLM's own method `extract_hidden_states`, written by `connector`.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...recipes.errors import short
from ..errors import TraceError
from ..traces.manifest import FeatureDtype
from .states_file import FOLDER_KEY, layer_inputs

LOGPROBS_MODE = "processed_logprobs"
_PACKAGE = __package__
_VLLM_MAX_LOGPROBS = 20  # what vLLM takes without being told

_NATIVE_ROPE = "-rotary_embedding"

_OURS = {
    "model": "give --target",
    "dtype": "give --dtype",
    "speculative_config": "hidden states are extracted by a method of its own",
    "kv_transfer_config": "draftquant's connector writes the hidden states",
    "scheduler_cls": "draftquant's proposes nothing, so that decoding is what it is without draft",
    "enable_prefix_caching": "what is taken from the cache has no hidden states",
    "logprobs_mode": f"traces hold {LOGPROBS_MODE}",
    "async_scheduling": "the scheduler that proposes nothing does not run ahead",
    "decode_context_parallel_size": "it spreads the states of one request over GPUs",
    "prefill_context_parallel_size": "it spreads the states of one request over GPUs",
}
"""Arguments that the recorder sets or rules out, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What a recording needs of the engine.

    Attributes:
        target: as the engine is to find it.
        aux_layer_ids: layers whose outputs are recorded, as we count.
        dtype: the target computes in.
        max_model_len: tokens of the longest prompt with its continuation.
        num_top_logprobs: see `Decoding`.
        folder: where the engine's workers write, and the recorder reads.
        plain_latent_rope: see `TargetShape`.
        given: the user's own arguments, by vLLM's names.
    """

    target: Path
    aux_layer_ids: tuple[int, ...]
    dtype: FeatureDtype
    max_model_len: int
    num_top_logprobs: int
    folder: Path
    plain_latent_rope: bool = False
    given: Mapping[str, object]

    def arguments(self) -> dict[str, object]:
        """For `vllm.LLM`.

        Raises:
            TraceError: what the user gave contradicts what recording needs.
        """
        given = {name.replace("-", "_"): value for name, value in self.given.items()}
        self._check(given)
        logprobs = max(self.num_top_logprobs, _VLLM_MAX_LOGPROBS)
        return {
            "model": str(self.target),
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            **({"max_logprobs": logprobs} if logprobs > _VLLM_MAX_LOGPROBS else {}),
            **given,
            **self._native_rope(given),
            "enable_prefix_caching": False,
            "logprobs_mode": LOGPROBS_MODE,
            "async_scheduling": False,  # 0.33 turns it on with GPUs, whatever the scheduler
            "scheduler_cls": f"{_PACKAGE}.scheduler.PlainScheduler",
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {
                    "hf_config": {
                        "eagle_aux_hidden_state_layer_ids": list(layer_inputs(self.aux_layer_ids))
                    }
                },
            },
            "kv_transfer_config": {
                "kv_connector": "StatesConnector",
                "kv_connector_module_path": f"{_PACKAGE}.connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {FOLDER_KEY: str(self.folder.absolute())},
            },
        }

    def _native_rope(self, given: Mapping[str, object]) -> dict[str, object]:
        """For MLA without yarn, rotary angles in torch instead of in a kernel.

        vLLM 0.32's kernel for CPUs reads queries and keys [tokens, heads, 64] as two-dimensional:
        hidden states are off by a fifth, and nothing says so. Yarn never takes that kernel.

        Raises:
            TraceError: the user's own compilation_config cannot be added to.
        """
        if not self.plain_latent_rope:
            return {}
        config = given.get("compilation_config", {})
        chosen = config.get("custom_ops", []) if isinstance(config, Mapping) else None
        if not isinstance(config, Mapping) or not isinstance(chosen, list):
            raise TraceError(
                "--engine-arg compilation_config",
                f"expected an object, to which {_NATIVE_ROPE} is added for this target, got"
                f" {short(config)}",
                fix='give it as {"mode": 3}, for example',
            )
        missing = [] if _NATIVE_ROPE in chosen else [_NATIVE_ROPE]
        return {"compilation_config": {**config, "custom_ops": [*chosen, *missing]}}

    def command(self) -> str:
        """The shell command that starts a server so.

        Raises:
            TraceError: as of `arguments`.
        """
        arguments = self.arguments()
        words = ["vllm", "serve", str(arguments.pop("model"))]
        for name, value in arguments.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
                words += [f"--{flag}", text]
        return shlex.join(words)

    def _check(self, given: Mapping[str, object]) -> None:
        for name in given.keys() & _OURS.keys():
            raise TraceError(f"--engine-arg {name}", f"cannot be given: {_OURS[name]}",
                             fix="leave it out")  # fmt: skip
        if self.dtype == "float64":
            raise TraceError("--dtype", "vLLM does not compute in float64",
                             fix="give bfloat16, float16 or float32")  # fmt: skip
        longest = given.get("max_model_len")
        if longest is not None and (type(longest) is not int or longest < self.max_model_len):
            raise TraceError(
                "--engine-arg max_model_len",
                f"expected at least {self.max_model_len}, the longest prompt with its continuation,"
                f" got {short(longest)}",
                fix="give a larger number, or leave it out",
            )
