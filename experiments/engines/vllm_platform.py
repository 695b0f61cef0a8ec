"""vLLM 0.33 made to believe that it runs on a GPU, in an environment without one.

Every fake says what it replaces and why loading does not notice. Kernels are never run.
"""

import contextlib
import importlib.util
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

CAPABILITIES = {"sm80": (8, 0), "sm90": (9, 0), "sm100": (10, 0)}
ARCHS = (*CAPABILITIES, "gfx942", "gfx950")
_COMPILED = ("_C", "_moe_C", "_C_cache_ops")
_MODELS = ("deepseek_eagle3", "llama_eagle3", "qwen3_dflash", "qwen3_dflash2", "qwen3_dspark")


def install(arch: str) -> None:
    """Fake the platform for the rest of the process."""
    _stand_in_for_packages()
    _import_models()
    if arch in CAPABILITIES:
        _claim_cuda(CAPABILITIES[arch])
    else:
        _claim_rocm(arch)
    _stand_in_for_compiled_ops()
    _start_one_process_group()


def _stand_in_for_packages() -> None:
    """Replaces: Triton's and torchvision's, which models of Qwen3-Next and Qwen3.5 import.

    Kernels and pictures are not asked for when weights are loaded. What is not there, Transformers
    has found out before.
    """
    import vllm.config.vllm as config
    import vllm.model_executor.models.registry as registry
    from transformers import AutoProcessor  # noqa: F401
    from vllm.triton_utils import triton

    config.HAS_TRITON = True  # without which the V2 model runner is not chosen
    triton.Config = lambda sizes, num_stages=3, num_warps=4, **_named: types.SimpleNamespace(
        kwargs=sizes, num_stages=num_stages, num_warps=num_warps
    )  # modules of kernels filter theirs
    registry._run_in_subprocess = lambda function: function()  # a process has no fakes
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["torchvision.transforms.v2"].functional = None


def become_rank(tp: int, rank: int) -> None:
    """Pretend to be one of `tp` tensor-parallel processes.

    Replaces: the size and rank of the tensor-parallel group. Layers and loaders ask the group for
    these two numbers only; what they would send to other ranks, they send when they run.
    """
    import vllm.distributed.parallel_state as parallel_state

    group = parallel_state.get_tp_group()
    group.world_size, group.rank_in_group = tp, rank


def _import_models() -> None:
    """Import while the platform is still the CPU: modules of compiled parts are then not asked for.

    Models and quantization methods ask for the platform again when they are built.
    """
    for name in _MODELS:
        if importlib.util.find_spec(found := f"vllm.model_executor.models.{name}"):
            importlib.import_module(found)
    from vllm.model_executor.layers.quantization import get_quantization_config

    for method in ("quark", "compressed-tensors", "modelopt", "modelopt_fp4", "fp8", "awq"):
        get_quantization_config(method)


def _claim_cuda(capability: tuple[int, int]) -> None:
    """Replaces: what the platform says of itself. Schemes are chosen by these answers alone."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability, PlatformEnum
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    on_cpu = type(current_platform)

    class FakedCuda(on_cpu):  # type: ignore[misc, valid-type]
        _enum = PlatformEnum.CUDA

        @classmethod
        def get_attn_backend_cls(
            cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
        ) -> str:
            """That of a CPU, but for the attention of an indexer, and for MLA before 0.28."""
            if attn_selector_config.use_sparse:
                return AttentionBackendEnum.FLASHMLA_SPARSE.get_path()
            given = (selected_backend, attn_selector_config, num_heads)
            with contextlib.suppress(NotImplementedError):
                return str(on_cpu.get_attn_backend_cls(*given))
            return AttentionBackendEnum.TRITON_MLA.get_path()

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            del device_id
            return DeviceCapability(*capability)

        @classmethod
        def supports_fp8(cls) -> bool:
            return capability >= (8, 9)

        @classmethod
        def is_fp8_fnuz(cls) -> bool:
            return False

        @classmethod
        def fp8_dtype(cls) -> torch.dtype:
            return torch.float8_e4m3fn

    current_platform.__class__ = FakedCuda
    _stand_in_for_kernels()


def _stand_in_for_kernels() -> None:
    """Replaces: packages of vLLM's wheel for CUDA. Humming has kernels of integers in any number of
    bits, groups of any size and FP8 in any blocks; whether it is there decides which kernel is
    taken. DeepGEMM has those of an indexer, which is not built without them.
    """
    import vllm.model_executor.kernels.linear.mixed_precision.humming as integers
    import vllm.model_executor.kernels.linear.scaled_mm.humming as floats
    import vllm.model_executor.layers.sparse_attn_indexer as indexer

    integers.has_humming = floats.has_humming = indexer.has_deep_gemm = lambda: True


def _claim_rocm(arch: str) -> None:
    """Replaces: AMD's library of GPUs, of which vLLM's own platform of ROCm asks the name only."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    prefill = MLAPrefillBackendEnum.CPU.get_class()  # kernels as well
    library = types.ModuleType("amdsmi")
    answers: dict[str, Any] = {
        "amdsmi_get_gpu_asic_info": {"target_graphics_version": arch},
        "amdsmi_get_processor_handles": [0],
        "amdsmi_get_gpu_memory_total": 256 << 30,
    }
    for name in ("init", "shut_down", "topo_get_link_type", "topo_get_numa_node_number"):
        answers[f"amdsmi_{name}"] = None
    answers["amdsmi_get_gpu_device_uuid"] = "0"
    for name, answer in answers.items():
        setattr(library, name, lambda *_arguments, answer=answer: answer)
    library.AmdSmiException, library.AmdSmiMemoryType = Exception, types.SimpleNamespace(VRAM=0)
    sys.modules["amdsmi"] = library
    from vllm.platforms.rocm import RocmPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    class FakedRocm(RocmPlatform):
        @classmethod
        def get_attn_backend_cls(
            cls, selected_backend: object, attn_selector_config: Any, num_heads: int | None = None
        ) -> str:
            """Kernels of attention, of which one is imported before the others are asked for."""
            backends = AttentionBackendEnum
            del selected_backend, num_heads
            chosen = backends.TRITON_MLA if attn_selector_config.use_mla else backends.TRITON_ATTN
            return chosen.get_path()

        @classmethod
        def get_mla_prefill_backend_cls(cls, mla_selector_config: object) -> Any:
            del mla_selector_config
            return prefill

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            del device_id
            return 304

    current_platform.__class__ = FakedRocm


class CompiledOpCalledError(NotImplementedError):
    """A kernel was called."""


def needs_gpu(exc: Exception) -> bool:
    """True for what only an environment without a GPU raises."""
    missing_gpu = (
        "Torch not compiled with CUDA enabled",
        "scales must be on gpu",
        "Cannot access accelerator device when none is available.",
        "'function' object is not subscriptable",  # a kernel of Triton, which is not there
        "No module named 'humming'",  # kernels of the wheel for CUDA
    )
    unfinished = re.match("'Humming.*object has no attribute 'layer_config'", str(exc))
    # Images for ROCm have both packages of kernels.
    no_kernels = re.search("AITER not found|amd-quark package not available", str(exc)) is not None
    called = isinstance(exc, CompiledOpCalledError)
    return called or bool(unfinished) or no_kernels or str(exc) in missing_gpu


class CompiledOp:
    """A compiled op that is not there. "Is this supported?" is answered as on the real GPU: yes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_arguments: object, **_named: object) -> bool:
        if "supports" in self.name or "supported" in self.name:
            return True
        raise CompiledOpCalledError(f"compiled op {self.name} was called")

    def __getattr__(self, name: str) -> "CompiledOp":
        if name.startswith("__"):
            raise AttributeError(name)
        return self  # an overload of the same op


def _stand_in_for_compiled_ops() -> None:
    """Replaces: ops of the compiled extension, which methods look up when they are built."""
    look_up = torch._ops._OpNamespace.__getattr__

    def look_up_or_stand_in(namespace: torch._ops._OpNamespace, name: str) -> object:
        try:
            return look_up(namespace, name)
        except AttributeError:
            if namespace.name in _COMPILED and not name.startswith("__"):
                return CompiledOp(name)
            raise

    torch._ops._OpNamespace.__getattr__ = look_up_or_stand_in


def _start_one_process_group() -> None:
    """Layers need a process group to exist: one process, over a file."""
    import vllm.distributed.parallel_state as parallel_state
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.worker.workspace import init_workspace_manager

    meeting = (Path(tempfile.mkdtemp()) / "group").as_uri()
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, distributed_init_method=meeting, local_rank=0, backend="gloo"
        )
        parallel_state.initialize_model_parallel(1, 1)
    init_workspace_manager(torch.device("cpu"))  # as a worker does first
    torch.accelerator.empty_cache = lambda: None  # before a workspace of kernels is made larger
