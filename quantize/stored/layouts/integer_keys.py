"""What GPTQ's, AutoRound's and AWQ's declarations of packed integers have in common."""

from .reader import ObjectReader

SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Of groups, beside -1: one for each row."""
_NO_MEANING = (
    "act_data_type",
    "act_dynamic",
    "act_group_size",
    "act_sym",
    "amp",
    "autoround_version",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_percent",
    "dataset",
    "do_fuse",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "enable_quanted_input",
    "exllama_config",
    "fuse_max_seq_len",
    "gradient_accumulate_steps",
    "iters",
    "lm_head",
    "low_gpu_mem_usage",
    "lr",
    "max_input_length",
    "meta",
    "minmax_lr",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "modules_to_fuse",
    "nsamples",
    "pad_token_id",
    "provider",
    "quant_block_list",
    "scale_dtype",
    "seqlen",
    "static_attention_granularity",
    "static_groups",
    "static_kv_granularity",
    "to_quant_block_names",
    "tokenizer",
    "train_bs",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
)
"""How values were found, which modules were looked at, and which kernels are to be used."""


def check_integers(keys: ObjectReader) -> None:
    """Weights are integers of one stage, inputs and the KV cache are not quantized.

    Raises:
        DeclarationError: they are not.
    """
    keys.skip(*_NO_MEANING)
    keys.optional("data_type", "int", None)
    keys.optional("act_bits", 16, 32, None)
    keys.absent("static_attention_dtype", "static_kv_dtype", "super_bits", "super_group_size")
