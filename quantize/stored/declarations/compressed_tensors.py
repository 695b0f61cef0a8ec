"""compressed-tensors 0.20, `QuantizationConfig`; one group that targets every Linear."""

from .reader import ObjectReader, not_understood
from .scheme import SPEC_NO_MEANING, Activations, DeclaredScheme, Granularity, WeightDtype

_FORMATS: dict[str, WeightDtype] = {
    "pack-quantized": "int4",
    "float-quantized": "fp8_e4m3",
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
}
_GRANULARITIES: dict[str, Granularity] = {
    "channel": "channel",
    "tensor": "tensor",
    "block": "block",
    "group": "group",
    "tensor_group": "group",
}
BLOCK = 128
# dtype of the weights -> strategies and group sizes
_STRATEGIES: dict[WeightDtype, dict[str, tuple[int, ...]]] = {
    "int4": {"channel": (), "group": (32, 64, 128)},
    "fp8_e4m3": {"channel": (), "tensor": (), "block": ()},
    "nvfp4": {"tensor_group": (16,)},
    "mxfp4": {"group": (32,)},
}


def read(keys: ObjectReader) -> DeclaredScheme:
    """Read a `quantization_config` with quant_method "compressed-tensors".

    Raises:
        VerifyError: it says something that is not understood.
    """
    form = keys.choice("format", *_FORMATS)
    keys.optional("quantization_status", "compressed")
    keys.absent("kv_cache_scheme", "sparsity_config", "moe_sparsity_config", "transform_config")
    group = only_group(keys)
    group.optional("format", form, None)
    group.absent("output_activations")
    dtype = _FORMATS[form]
    weights = group.section("weights", ignored=SPEC_NO_MEANING)
    strategies = _STRATEGIES[dtype]
    strategy = weights.choice("strategy", *strategies)
    sizes = strategies[strategy]
    group_size = weights.choice("group_size", *sizes) if sizes else None
    if not sizes:
        weights.absent("group_size")
    if strategy == "block":
        weights.numbers("block_structure", BLOCK, BLOCK)
        group_size = BLOCK
    else:
        weights.absent("block_structure")
    _args(weights, bits=8 if dtype == "fp8_e4m3" else 4, kind="int" if dtype == "int4" else "float")
    weights.absent("dynamic")
    weights.finish()
    activations: Activations = "none"
    if group.has("input_activations"):
        inputs = group.section("input_activations", ignored=SPEC_NO_MEANING)
        if dtype == "nvfp4":
            activations = _nvfp4_inputs(inputs)
        elif strategy == "block":
            activations = _fp8_groups(inputs)
        else:
            activations = _fp8_inputs(inputs)
    group.finish()
    return DeclaredScheme(
        layout="compressed-tensors",
        weight_dtype=dtype,
        granularity=_GRANULARITIES[strategy],
        group_size=group_size,
        pack_method="order" if dtype == "int4" else None,
        activations=activations,
        excludes=keys.strings("ignore"),
    )


def only_group(keys: ObjectReader) -> ObjectReader:
    """The one entry of `config_groups`, which must target every Linear."""
    groups = keys.section("config_groups")
    group = groups.section("group_0")
    groups.finish()
    if group.strings("targets") != ("Linear",):
        raise not_understood(
            group.where, f"{group.key}.targets", ("['Linear']",), list(group.strings("targets"))
        )
    return group


def _fp8_inputs(inputs: ObjectReader) -> Activations:
    _args(inputs, bits=8, kind="float")
    inputs.absent("group_size", "block_structure")
    strategy = inputs.choice("strategy", "token", "tensor")
    inputs.choice("dynamic", strategy == "token")
    inputs.finish()
    return "token-dynamic" if strategy == "token" else "tensor-static"


def _fp8_groups(inputs: ObjectReader) -> Activations:
    """Groups of 128, one side of a block: what engines compute for blocks, whatever is declared."""
    _args(inputs, bits=8, kind="float")
    inputs.absent("block_structure")
    inputs.choice("strategy", "group")
    inputs.choice("group_size", BLOCK)
    inputs.choice("dynamic", True)
    inputs.finish()
    return "group-dynamic"


def _nvfp4_inputs(inputs: ObjectReader) -> Activations:
    """Groups of 16 under a stored global scale."""
    _args(inputs, bits=4, kind="float")
    inputs.absent("block_structure")
    inputs.choice("strategy", "tensor_group")
    inputs.choice("group_size", 16)
    inputs.choice("dynamic", "local")
    inputs.finish()
    return "nvfp4"


def _args(args: ObjectReader, *, bits: int, kind: str) -> None:
    args.choice("num_bits", bits)
    args.choice("type", kind)
    args.choice("symmetric", True)
    args.absent("actorder", "scale_dtype", "zp_dtype")
