"""What TensorRT-LLM makes of a draft, as far as its public source says: read, never executed.

Sources, each in the newest version that was to be had of the main branch, 2026:
`tensorrt_llm/_torch/model_config.py` at 008e0af8 and `tensorrt_llm/models/quant_config_utils.py` at
21156a7a (what is read of a declaration, and these errors), `_torch/models/modeling_speculative.py`
at 00679c66 (a draft gets a config of its own: nothing but the dtype of the KV cache is the
target's), `_torch/modules/linear.py` at 00bbf71e, `_torch/models/modeling_utils.py` at cb4c622c and
`checkpoints/hf/weight_mapper.py` at f59aed07 (a linear that is not quantized takes `weight` alone,
cast to its own dtype), `docs/source/features/speculative-decoding.md` at 04c8822c (the command).
Loading was read to its end for a Llama draft without a quantization that is understood. Whatever
goes beyond is UNKNOWN here.
"""

import json
import shlex
from collections.abc import Mapping

from ..drafts.engine_traits import Finding
from .contract import Module, Question, Scheme
from .engine import Serving, flag

_USE = "use FP8 in layout modelopt: recipe blackwell-fp8, or NVFP4: blackwell-nvfp4"
_NO_INPUTS = "TypeError: 'NoneType' object is not subscriptable"
"""`group_config["input_activations"]["strategy"]`, where a group has no activations."""
_OF_BF16 = "Loading in TensorRT-LLM was never executed, and its source was read in part only"
_BITS = "ValueError: Unsupported quant_bits: 4. Supported: 8 (FP8) or 4 (NVFP4)."
_TENSOR = (
    "ValueError: Unsupported weights_quant_strategy: tensor."
    " Supported strategies: 'channel', 'block'."
)
_STATIC = "ValueError: Unsupported inputs_quant_strategy: tensor."

_REFUSED: Mapping[str, str] = {
    "compressed-tensors int4 channel none": _NO_INPUTS,
    "compressed-tensors int4 group128 none": _NO_INPUTS,
    "compressed-tensors int4 channel token-dynamic": _BITS,
    "compressed-tensors int4 group128 token-dynamic": _BITS,
    "compressed-tensors fp8 channel none": _NO_INPUTS,
    "compressed-tensors fp8 channel tensor-static": _STATIC,
    "compressed-tensors fp8 tensor none": _NO_INPUTS,
    "compressed-tensors fp8 tensor token-dynamic": _TENSOR,
    "compressed-tensors fp8 tensor tensor-static": _TENSOR,
    "compressed-tensors nvfp4 none": _NO_INPUTS,
}
_READ_AS: Mapping[str, str] = {
    "modelopt fp8 tensor tensor-static": "FP8",
    "modelopt fp8 channel token-dynamic": "FP8_PER_CHANNEL_PER_TOKEN",
    "modelopt nvfp4 nvfp4": "NVFP4",
    "modelopt nvfp4 none": "W4A16_NVFP4",
    "compressed-tensors fp8 channel token-dynamic": "FP8_PER_CHANNEL_PER_TOKEN",
    "compressed-tensors fp8 block group-dynamic": "FP8_BLOCK_SCALES",
    "compressed-tensors nvfp4 nvfp4": "NVFP4",
    "compressed-tensors mxfp4 none": "W4A16_MXFP4",
    "fp8 fp8 tensor tensor-static": "FP8_BLOCK_SCALES",
    "fp8 fp8 block group-dynamic": "FP8_BLOCK_SCALES",
}
_NOT_READ = frozenset(
    {
        "fp8 fp8 tensor token-dynamic",
        "quark fp8 channel token-dynamic",
        "quark fp8 channel tensor-static",
        "quark fp8 tensor token-dynamic",
        "quark fp8 tensor tensor-static",
        "quark fp8 channel none",
        "quark fp8 tensor none",
    }
)
"""`load_hf_quant_config` has no branch for these: the draft counts as unquantized."""
_SIDE_FILE = frozenset({"modelopt"})
"""Layouts whose declaration is in hf_quant_config.json as well."""
SCHEMES: Mapping[str, Mapping[str, Scheme]] = {
    signature: {"*": Scheme(_READ_AS.get(signature, "none"))}
    for signature in (*_REFUSED, *_READ_AS, *_NOT_READ)
}


def config_problem(question: Question) -> Finding | None:
    """All that is known of a draft: what its declaration is read as."""
    declared = question.declaration
    if declared is None:
        return Finding("unknown", _OF_BF16, "try it")
    if question.has_side_file and declared.method not in _SIDE_FILE:
        text = "TensorRT-LLM reads hf_quant_config.json first, and this folder has one"
        return Finding("unknown", text, "remove hf_quant_config.json")
    signature, method = question.signature, declared.method
    if signature in _REFUSED:
        return Finding("config", _REFUSED[signature], _USE)
    if signature in _READ_AS:
        text = (
            f"TensorRT-LLM reads this declaration as {_READ_AS[signature]}, and loading such a"
            " folder was never executed"
        )
        return Finding("unknown", text, "try it")
    if signature not in _NOT_READ:
        text = f"What TensorRT-LLM makes of the quant_method {method} in this form was not read"
        return Finding("unknown", text, _USE)
    text = f"TensorRT-LLM does not read the quantization_config of {method}"
    if question.traits.tensorrt_llm.read:
        text = f"{text}: it takes the FP8 values as plain numbers without their scales"
        return Finding("wrong", text, _USE)
    return Finding("unknown", f"{text}; how it then loads was read for Llama only", _USE)


def launch(question: Question, num_draft_tokens: int, serving: Serving) -> str:
    """The server's command line; JSON is YAML. The draft is split as the target is."""
    config = {
        "decoding_type": question.own.served_as,
        "max_draft_len": num_draft_tokens,
        **({"speculative_model": serving.draft} if serving.draft is not None else {}),
    }
    return serving.line(
        f"echo {shlex.quote(json.dumps({'speculative_config': config}))} > draft.yaml &&",
        f"trtllm-serve {shlex.quote(serving.target)} --tp_size {question.tp}",
        flag("--max_seq_len", serving.context),
        "--config draft.yaml",
    )


def no_modules(_question: Question) -> tuple[Module, ...]:
    """Which linears it builds was not read."""
    return ()
