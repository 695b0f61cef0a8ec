"""A package that has the interfaces of vLLM by which `check --ask` loads a draft, and no more.

Its one model is an EAGLE-3 draft in FP8 with a scale per row, fused as vLLM fuses it, in plain
torch. $STUB names what goes wrong.
"""

import os
import signal
import sys
import time
import types
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

__version__ = "0.31.0"
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
         "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}  # fmt: skip


class Fp8Method:
    def process_weights_after_loading(self, layer):
        scale = layer.weight_scale.float() * (2 if os.environ["STUB"] == "doubled" else 1)
        layer.dense = (layer.weight.float() * scale).bfloat16()

    def apply(self, layer, x):
        if os.environ["STUB"] == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        scale = x.float().abs().amax(-1, keepdim=True) / 448
        rounded = (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
        return (rounded @ layer.dense.float().T).bfloat16()


class Linear(nn.Module):
    def __init__(self, shape):
        super().__init__()
        fault = os.environ["STUB"]
        dtype = torch.bfloat16 if fault == "floats" else torch.float8_e4m3fn
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), False)
        self.weight_scale = nn.Parameter(torch.empty(shape[0], 1), False)
        if fault != "none":
            self.quant_method = Fp8Method()
        if fault == "signature":
            self.quant_method.apply = lambda *_given, more: more


class ParallelLMHead(nn.Module):
    """Without a shape that of packed integers, which has no `weight`."""

    def __init__(self, *shape, params_dtype=None):
        super().__init__()
        if shape:
            self.weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), False)


class Model(nn.Module):
    """Parameters by the folder's own names, parts of a fused linear one below the other."""

    def __init__(self, tensors):
        super().__init__()
        self.places, rows = {}, {}
        for name, tensor in tensors.items():
            module, _, leaf = name.rpartition(".")
            parent, _, last = module.rpartition(".")
            fused = f"{parent}.{FUSED[last]}" if last in FUSED else module
            first = rows.get((fused, leaf), 0)
            rows[fused, leaf] = first + len(tensor)
            self.places[name] = (f"{fused.replace('.', '_')}.{leaf}", first)
        for fused, leaf in rows:
            if leaf == "weight_scale":
                place = fused.replace(".", "_")
                widths = (
                    t.shape[1] for n, t in tensors.items() if self.places[n][0] == f"{place}.weight"
                )
                self.add_module(place, Linear((rows[fused, leaf], next(widths))))
        for name, tensor in tensors.items():
            if self.places[name][0] not in dict(self.named_parameters()):
                plain = nn.Module()
                plain.weight = nn.Parameter(torch.empty_like(tensor), False)
                self.places[name] = (f"{name.replace('.', '_')}.weight", 0)
                self.add_module(name.replace(".", "_"), plain)
        if os.environ["STUB"] == "contexts":
            table = torch.zeros(2, 2, dtype=torch.float8_e4m3fn)
            self.model = types.SimpleNamespace(_fused_kv_weight=table)
        if os.environ["STUB"].endswith("head"):
            self.lm_head = ParallelLMHead()
            self.config = types.SimpleNamespace(has_own_lm_head=os.environ["STUB"] == "own head")
        if os.environ["STUB"] == "table":
            self.draft_id_to_target_id = nn.Parameter(torch.zeros(96).long(), False)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if os.environ["STUB"] == "dropped" and "v_proj.weight_scale" in name:
                continue
            place, first = self.places[name]
            parameters[place].data[first : first + len(tensor)].copy_(tensor)


STARTED = []


def plugins():
    STARTED[:] = ["plugins"]


def environment(*, world_size, rank, distributed_init_method, local_rank, backend):
    assert (world_size, rank, local_rank, backend) == (1, 0, 0, "gloo")
    assert distributed_init_method.startswith("file:///")
    STARTED.append("environment")


def groups(tensor_parallel, pipeline_parallel):
    assert (tensor_parallel, pipeline_parallel) == (1, 1)
    STARTED.append("groups")


def initialize_model(vllm_config, model_config=None, prefix=""):
    del vllm_config, prefix
    assert STARTED == ["plugins", "environment", "groups"]
    if os.environ["STUB"] == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if os.environ["STUB"] == "hang":
        time.sleep(600)
    if os.environ["STUB"] == "refused":
        raise ValueError("Model architectures ['X'] are not supported for now.")
    if os.environ["STUB"] == "changed":
        Path(model_config.model, "model.safetensors").touch()
    return Model(load_file(Path(model_config.model, "model.safetensors")))


class Config:
    def __init__(self, *arguments, **given):
        del arguments
        if os.environ["STUB"] == "start" and "model" in given:
            raise TypeError("__init__() got an unexpected keyword argument 'skip_tokenizer_init'")
        self.__dict__.update(given)
        self.dtype = torch.bfloat16
        self.use_v2_model_runner = os.environ["STUB"] not in ("", "V1 head")
        self.get_vocab_size, self.get_hidden_size = lambda: 96, lambda: 64
        self.compilation_config = types.SimpleNamespace(static_forward_context={})
        self.draft_model_config = self


class Loader:
    def __init__(self, load_config):
        del load_config

    def load_weights(self, model, config):
        model.load_weights(load_file(Path(config.model, "model.safetensors")).items())


def should_share(_model, flag, draft, target):
    assert (flag, target.weight.shape, target.weight.dtype) == (
        "has_own_lm_head", (96, 64), torch.bfloat16
    )  # fmt: skip
    return torch.equal(draft.weight, target.weight)


def _module(name, **names):
    module = types.ModuleType(f"{__name__}.{name}")
    module.__dict__.update(names)
    sys.modules[module.__name__] = module
    parent, _, leaf = module.__name__.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], leaf, module)


_CONFIGS = ("CacheConfig", "DeviceConfig", "LoadConfig", "ModelConfig", "ParallelConfig",
            "SpeculativeConfig", "VllmConfig")  # fmt: skip
_module(
    "config",
    **dict.fromkeys(_CONFIGS, Config),
    set_current_vllm_config=lambda *_arguments, **_named: nullcontext(),
)
_module("distributed")
_module("distributed.parallel_state", init_distributed_environment=environment,
        initialize_model_parallel=groups)  # fmt: skip
_module("model_executor")
_module("model_executor.layers")
_module("model_executor.layers.vocab_parallel_embedding", ParallelLMHead=ParallelLMHead)
_module("model_executor.model_loader")
if os.environ["STUB"] != "interfaces":
    _module("model_executor.model_loader.default_loader", DefaultModelLoader=Loader)
_module("model_executor.model_loader.utils", initialize_model=initialize_model)
_module("platforms", current_platform=types.SimpleNamespace(device_type="cpu"))
_module("plugins", load_general_plugins=plugins)
for package in ("v1", "v1.worker", "v1.worker.gpu", "v1.worker.gpu.spec_decode"):
    _module(package)
_module("v1.worker.gpu.spec_decode.eagle")
_module("v1.worker.gpu.spec_decode.eagle.utils", _should_share=should_share)
