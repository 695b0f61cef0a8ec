"""compressed-tensors alone: its schemes on modules with the draft's names, its own compressor."""

from pathlib import Path

from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from maker import main
from tree import module_tree, write_folder

IGNORES = (
    ["lm_head", "fc"],
    ["re:.*lm_head", "re:.*fc$", "re:.*embed_tokens"],
    ["lm_head", "model.fc", "fc", "re:.*kv_b_proj$"],
)
PRESETS = ("W4A16", "FP8", "FP8_DYNAMIC", "W8A16", "INT8", "W4A8", "W4AFP8", "W4A16_ASYM")


def make(scheme: str, source: Path, out: Path, variant: int) -> None:
    """See `maker.Make`."""
    model = module_tree(source)
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    config = QuantizationConfig(config_groups=groups, ignore=IGNORES[variant])
    apply_quantization_config(model, config)
    for module in model.modules():
        chosen = getattr(module, "quantization_scheme", None)
        if chosen is None or not hasattr(module, "weight_scale"):
            continue
        rows, columns = module.weight.shape
        size = chosen.weights.group_size
        width = {"tensor": rows * columns, "channel": columns, "group": size}
        parts = module.weight.float().reshape(-1, width[chosen.weights.strategy])
        scale, zero = calculate_qparams(parts.amin(1), parts.amax(1), chosen.weights)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.02)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    write_folder(out, source, model.state_dict(), None)
    compressor.update_config(str(out))


if __name__ == "__main__":
    main("compressed-tensors", PRESETS, make, every=5)
