"""SGLang 0.5.23 made to believe that it runs on a GPU, in an environment without one.

Every fake says what it replaces and why loading does not notice. Kernels are never run.
`install` comes before the first import of sglang.
"""

import contextlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CUDA_CAPABILITIES = {"sm80": (8, 0), "sm90": (9, 0), "sm100": (10, 0)}
ROCM_CAPABILITIES = {"gfx942": (9, 4), "gfx950": (9, 5)}
ARCHS = (*CUDA_CAPABILITIES, *ROCM_CAPABILITIES)
# Packages of kernels: SGLang imports them on a GPU, and calls them when it serves.
_KERNEL_PACKAGES = frozenset({
    "IPython", "aiter", "cuda", "cutlass", "deep_ep", "deep_gemm", "flash_mla", "flashinfer",
    "humming", "mooncake", "nvshmem", "sgl_deep_gemm", "sgl_kernel", "tilelang",
    "torch_memory_saver", "torchvision", "triton",
})  # fmt: skip
# Arithmetic of theirs that SGLang needs to choose a kernel, and what an indexer asks for.
_ARITHMETIC = {
    "cutlass.cute.ceil_div": lambda a, b: -(-a // b),
    "deep_gemm.get_num_sms": lambda: 132,
}
# What kernels of linear attention, which Qwen3-Next imports, look up a module of torch by.
_ANSWERS = {"triton.runtime.driver.active.get_current_target.backend": "cuda"}
_ARGUMENTS: dict[str, Any] = {"device": "cuda", "attention_backend": "triton"}


def install(arch: str) -> None:
    """Fake the platform for the rest of the process."""
    _freeze_what_transformers_found()
    sys.meta_path.insert(0, _KernelPackages())
    _claim_gpu(arch)
    if arch == "sm100":  # what it chooses by itself beside a Nemotron: `nemotron_h.py:139`
        _ARGUMENTS["speculative_draft_attention_backend"] = "trtllm_mha"
    _CudaIsCpu().__enter__()  # for the rest of the process
    _do_not_compile_kernels()
    publish_server_arguments(1)
    import sglang.srt.model_loader.loader
    import sglang.srt.models.registry  # noqa: F401

    # Whoever serves HTTP; workers import it, and nobody is served.
    sys.modules.setdefault("uvicorn", _StandInModule("uvicorn"))

    StandIn.may_be_called = False


def become_rank(tp: int, rank: int) -> None:
    """Pretend to be one of `tp` tensor-parallel processes, without any others.

    Replaces: the groups of processes. Layers and loaders ask for sizes and ranks only; what they
    would send to other ranks, they send when they run.
    """
    from sglang.srt import runtime_context

    context = runtime_context.get_parallel()
    values: dict[str, Any] = {}
    for name in runtime_context._parallel_fields():
        if name.endswith("_group"):
            alone = name.startswith(("pp", "moe", "dcp", "attn_cp"))
            values[name] = _Group(1, 0) if alone else _Group(tp, rank)
        elif name.endswith("_rank"):
            values[name] = rank if name in ("tp_rank", "attn_tp_rank", "moe_tp_rank") else 0
    context._stamp.update(values)


def publish_server_arguments(tp: int) -> None:
    """What `launch_server` publishes to all modules, and what the scheduler chooses from it."""
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args(tp_size=tp, **_ARGUMENTS).install()
    initialize_fp8_gemm_config()
    initialize_fp4_gemm_config()


class StandInCalledError(NotImplementedError):
    """A kernel was called."""


def needs_gpu(exc: Exception) -> bool:
    """True for what only these fakes raise: a kernel was called."""
    custom_op = "Could not run 'sglang::"  # torch's, of an op that SGLang registered for GPUs
    return isinstance(exc, StandInCalledError) or custom_op in str(exc)


class StandIn:
    """Anything that a kernel package offers: may be looked up, decorated with, subclassed.

    Modules call some of it while they are imported, so it answers while SGLang is set up, and after
    that to the top level of modules only.
    """

    may_be_called = True

    def __init__(self, *names: object, **_named: object) -> None:
        self._name = next((name for name in names if isinstance(name, str)), "stand-in")

    def __call__(self, *arguments: Any, **named: object) -> Any:
        alone = len(arguments) == 1 and not named
        if alone and isinstance(arguments[0], types.FunctionType | type):
            return arguments[0]  # a decorator
        if (sys._getframe(1).f_code.co_flags & inspect.CO_NEWLOCALS) and not self.may_be_called:
            raise StandInCalledError(f"{self._name} was called")
        return StandIn(self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self._name}.{name}"
        return _ANSWERS.get(full) or StandIn(full)

    def __getitem__(self, key: object) -> "StandIn":
        return StandIn(self._name)

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __or__(self, other: Any) -> Any:
        return other  # in a type annotation

    def __ror__(self, other: Any) -> Any:
        return other

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return (object,)

    def __bool__(self) -> bool:
        return False


class _StandInModule(types.ModuleType):
    __version__ = "99"
    __path__: list[str] = []  # noqa: RUF012  every sub-module is found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in _ARITHMETIC:
            return _ARITHMETIC[full]
        # A name like a class's becomes a class: it is used in isinstance and as a base.
        value = type(name, (StandIn,), {}) if name[0].isupper() else StandIn(full)
        setattr(self, name, value)
        return value


class _KernelPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the kernel packages.

    Replaces: their compiled code, which loading does not call. `sgl_kernel.scalar_type` is plain
    data that quantization methods compare, and is vLLM's file of the same name.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name.partition(".")[0] in _KERNEL_PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        if spec.name == "sgl_kernel.scalar_type":
            return importlib.import_module("vllm.scalar_type")
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Group:
    """A process group of which only size and place are asked."""

    def __init__(self, size: int, rank: int) -> None:
        self.world_size, self.rank, self.rank_in_group = size, rank, rank
        self.is_first_rank = self.is_last_rank = True  # of a pipeline of one stage
        self.first_rank = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_arguments, **_named: None


def _do_not_compile_kernels() -> None:
    """Replaces: the compiler of kernels that SGLang builds when they are first called."""
    from sglang.kernels.jit.utils.compile import ninja

    def generate(spec: Any) -> str:
        raise StandInCalledError(f"{spec.module_name} was called")

    ninja.generate = generate


class _CudaIsCpu(TorchFunctionMode):
    """Replaces: the device of tensors that are made on the GPU or moved to it. Bytes stay."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        named = {key: _cpu_for_cuda(value) for key, value in (named or {}).items()}
        if function is torch.Tensor.cuda:
            return arguments[0]
        if function in (torch.Tensor.to, torch.device):
            arguments = [_cpu_for_cuda(value) for value in arguments]
        return function(*arguments, **named)


def _cpu_for_cuda(value: object) -> object:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


def _freeze_what_transformers_found() -> None:
    """Transformers looks for packages once: before there are stand-ins for some of them."""
    import transformers.utils.import_utils as available

    for name in dir(available):
        if name.startswith("is_") and name.endswith("_available"):
            with contextlib.suppress(Exception):
                getattr(available, name)()
    import tvm_ffi  # noqa: F401  these too look for packages when first imported
    import xgrammar  # noqa: F401
    from transformers import AutoProcessor, PretrainedConfig  # noqa: F401


def _claim_gpu(arch: str) -> None:
    """Replaces: what torch says of its build and of the device. Methods are chosen by these."""
    capability = {**CUDA_CAPABILITIES, **ROCM_CAPABILITIES}[arch]
    if arch in CUDA_CAPABILITIES:
        torch.version.cuda = "13.0"
    else:
        torch.version.hip, torch.version.cuda = "7.0", None

    class Properties:
        name = "faked GPU"
        gcnArchName = arch  # noqa: N815  torch's name
        major, minor = capability
        multi_processor_count = 148 if arch == "sm100" else 132
        warp_size = 32 if arch in CUDA_CAPABILITIES else 64
        total_memory = 141 << 30
        shared_memory_per_block_optin = 227 << 10
        L2_cache_size = 50 << 20

    class Stream:
        def __init__(self, *_arguments: object, **_named: object) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return lambda *_arguments, **_named: None

    answers = {
        "is_available": True,
        "get_device_capability": capability,
        "get_device_properties": Properties,
        "get_device_name": Properties.name,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "empty_cache": None,
        "synchronize": None,
        "max_memory_allocated": 0,
        "mem_get_info": (Properties.total_memory, Properties.total_memory),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_arguments, answer=answer, **_named: answer)
    torch.cuda.Stream = torch.cuda.Event = Stream
    torch.cuda.current_stream = Stream
