"""Which layers of the target an engine's own code captures for a draft, as "input of layer k".

Only what reads config.json is run, on stand-ins for the runner and the target; None = the target's
default layers.
"""

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

Captured = dict[str, list[int] | None]
_DEEPSEEK_TYPES = ("deepseek_v3", "kimi_k2")


def reads_layers(method: str) -> bool:
    """Whether an engine hands outputs of layers to a draft that is served so."""
    return method in ("dflash", "dspark", "eagle3")


def vllm_captures(speculative_config: Any) -> Captured:
    """By runner: V2, and V1.

    Their modules import kernels, which are not there: each function is compiled alone.
    """
    second = function_of(
        "gpu/spec_decode/eagle/eagle3_utils.py", "get_eagle3_aux_layers_from_config"
    )
    first = function_of("gpu_model_runner.py", "_get_eagle3_aux_layers_from_config")
    if speculative_config.method == "dspark":  # of V2 alone
        return {"V2": _listed(second(speculative_config))}
    runner = SimpleNamespace(speculative_config=speculative_config)
    return {"V2": _listed(second(speculative_config)), "V1": _listed(first(runner))}


def function_of(file: str, name: str, **known: Any) -> Callable[..., Any]:
    """A function of a module of vLLM below `v1/worker`, without what imports kernels around it."""
    import vllm

    source = Path(vllm.__file__).parent / "v1" / "worker" / file
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (found,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    alone = ast.Module([ast.parse("from __future__ import annotations").body[0], found], [])
    exec(compile(alone, source, "exec"), known)  # what the engine runs
    function: Callable[..., Any] = known[name]
    return function


def sglang_captures(draft: Path, draft_config: Any, num_target_layers: int) -> Captured:
    """For a target of the kind that the draft's model_type says: DeepSeek's and Kimi's, or Llama's.

    Args:
        draft: its folder. draft_config: SGLang's ModelConfig of it.
        num_target_layers: of the target.
    """
    from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state as spec
    from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM
    from sglang.srt.models.llama import LlamaForCausalLM
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    dspark = any("DSpark" in name for name in draft_config.hf_config.architectures or [])
    block = dspark or hasattr(draft_config.hf_config, "dflash_config")
    kind = SpeculativeAlgorithm.DFLASH if block else SpeculativeAlgorithm.EAGLE3
    served = SimpleNamespace(num_hidden_layers=num_target_layers)
    found = spec.SpecAuxHiddenStateConfig()
    given = {
        "config": found,
        "server_args": None,
        "model_config": SimpleNamespace(hf_text_config=served, hf_config=served),
        "spec_algorithm": SpeculativeAlgorithm.DSPARK if dspark else kind,
        "is_draft_worker": False,
    }
    named = SimpleNamespace(
        speculative_draft_model_path=str(draft), speculative_draft_model_revision=None
    )
    with (
        patch.object(spec, "get_spec", lambda: named),
        patch.object(spec.ModelConfig, "from_server_args", lambda *_, **__: draft_config),
    ):
        spec._resolve_eagle_aux_hidden_state(**given)
        spec._resolve_dflash_aux_hidden_state(**given)
    deepseek = draft_config.hf_config.model_type in _DEEPSEEK_TYPES
    target_class = DeepseekV2ForCausalLM if deepseek else LlamaForCausalLM
    target = SimpleNamespace(
        pp_group=SimpleNamespace(is_last_rank=True), config=served, model=SimpleNamespace()
    )
    if found.dflash_use_aux_hidden_state:
        target_class.set_dflash_layers_to_capture(target, found.dflash_target_layer_ids)
    elif found.eagle_aux_hidden_state_layer_ids is None:
        return {"": None}
    else:
        target_class.set_eagle3_layers_to_capture(target, found.eagle_aux_hidden_state_layer_ids)
    return {"": list(target.model.layers_to_capture)}


def _listed(ids: Any) -> list[int] | None:
    return None if ids is None else list(ids)
