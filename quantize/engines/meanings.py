"""What an engine's error means: a plain sentence for each, with the engine's own text behind it.

The tables of engines hold the errors as they were executed or read. A person gets the sentence
first: "SGLang has no model for the architecture X [ValueError: ...]". Rows are asked in order.
"""

import re

_RAW = re.compile(r"\w*(Error|Exception)\b")
_HEADS = "The attention heads of the draft cannot be shared equally by so many GPUs (--tp)"
_SHARES = (
    "A width or the key-value heads of the draft cannot be shared equally by so many GPUs (--tp)"
)
_GROUPS = "The quantization groups of a linear cannot be shared equally by so many GPUs (--tp)"
_PARTS = "{engine} fuses linears into one, and only some of the parts of {0} are quantized"
_DOWN = "SGLang joins q_a_proj and kv_a_proj of MLA row by row, and "

_OF_CONFIG = {
    r"not a multiple of the number of attention heads": "The hidden size in config.json is not a"
    " multiple of the number of attention heads",
    r"`num_hidden_layers` \((\d+)\) must be equal .* `layer_types` \((\d+)\)": "config.json"
    " declares {0} layers, and lists layer_types for {1}",
    r"has model type `(.+?)`": "Transformers, by which {engine} reads config.json, does not know"
    " the model_type {0}",
    r"Unrecognized model in DRAFT": "config.json has no model_type, by which {engine} chooses the"
    " model",
    r"Model architectures \['(.*?)'\]": "{engine} has no draft model for the architecture {0}",
    r"Unsupported model_type (\S+) for Eagle3": "vLLM serves EAGLE-3 drafts of speculators with"
    " layers of Llama or Qwen3 only, and config.json says {0}",
    r"Expected one of: ": "{engine} does not read this kind of speculators draft",
    r"Cannot find model module\. '(.+?)'": "SGLang has no model for the architecture {0}",
    r"'SpeculatorsConfig' object has no attribute '(\w+)'": "The config.json of speculators lacks"
    " {0}, for which vLLM has no default",
    r"'topk_method'": "SGLang loads the draft as a whole DeepSeek model, and config.json lacks the"
    " key topk_method that a whole model has",
    r"'draft_vocab_size'": "SGLang needs the key draft_vocab_size in config.json",
    r"object has no attribute 'markov_rank'": "vLLM looks for markov_rank at the top level of"
    " config.json, where it is missing",
    r"'\w+Config' object has no attribute '(\w+)'": "The class that reads this model_type has no"
    " {0}, which {engine}'s draft model asks for",
    r"property '(\w+)' of '\w+' object has no setter": "The class that reads this model_type does"
    " not take {0} from config.json",
    r"Unsupported activation: (\S+)\. Only silu": "{engine} serves these drafts with silu only, and"
    " config.json, or the class of its model_type, says {0}",
    r"Unknown RoPE scaling type": "{engine} does not know the rotation of positions that"
    " config.json, or the class of its model_type, says",
    r"must have at least one layer": "{engine} needs a layer, and config.json counts none",
    r"requires markov_(\w+)": "SGLang needs the key markov_{0} in config.json",
    r"For parallel drafting|specify `dflash_config.mask_token_id`": "vLLM needs the id of the mask"
    " token to draft in parallel, and config.json names none",
    r"is no list of layers": "aux_hidden_state_layer_ids in config.json is not a list of layers",
    r"operand type\(s\) for \*\*": "rope_theta is null in config.json, and {engine} computes with"
    " it",
    r"operand type\(s\) for \*:": "The key target_hidden_size is null in config.json, and {engine}"
    " computes with it",
    r"argument 'size' got (.+) for the number": "{engine} counts the layers that fc reads by"
    " num_aux_hidden_states, which is {0} in config.json",
    r"TypeError: (\w+) is null in": "The key {0} is null in config.json, and {engine}"
    " computes with it",
    r"Missing 'quant_algo'": "The declaration names ModelOpt as its method, and no algorithm of it",
    r"EAGLE3 interface|set_\w+_layers_to_capture": "{engine}'s model of this target does not hand"
    " out the hidden states of its layers, which the draft reads",
    r"Field '(\w+)' expected (\w+), got NoneType": "{0} is null in config.json, and Transformers,"
    " by which {engine} reads it, wants a value of type {1}",
    r"'NoneType' is not iterable": "The key auto_map is null in config.json, and {engine} reads it",
    r"'NoneType' object (?!is not (?:callable|subscriptable))": "A section of config.json is null,"
    " and {engine} looks into it",
    r"only supports 1 layer": "SGLang serves EAGLE-3 drafts with MLA only if they have one layer",
    r"Only 1 nextn layer": "SGLang serves one MTP layer, and this folder has several",
    r"No Qwen3Next layer|is greater than the number of": "{engine} serves MTP layers of Qwen3-Next"
    " only if they have experts",
    r"context_length \((\d+)\) is greater than the derived context_length \((\d+)\)": "The"
    " target serves {0} tokens, and config.json of the draft allows {1}",
    r"hasattr\(config\.text_config": "SGLang looks for num_attention_heads in text_config of"
    " config.json, where it is missing",
    r"total_num_kv_heads % tp_size|(\S+) is not divisible by (\S+)": _SHARES,
    r"num_heads % \w*tp_size|total_num_heads divisible by tp_size": _HEADS,
    r"bfloat16 is not supported for quantization method (\w+)": "SGLang computes {0} in float16"
    " only, and config.json says bfloat16",
}
_OF_DECLARATIONS = {
    r"Sparse24": "SGLang no longer reads weights with 2:4 sparsity",
    r"Please install (\S+)": "{engine} needs another package for this format: {0}",
    r"output_tensors and bias quantized": "{engine} does not read Quark's quantized outputs and"
    " biases",
    r"INC quantization with bits=(\S+), sym=(\w+)": "{engine} has no kernel for AutoRound's"
    " weights of {0} bits (symmetric: {1})",
    r"Online transforms with tensor": "The folder declares transforms that run while serving, which"
    " {engine} does on one GPU only",
    r"a draft of GGUF": "A draft of GGUF is one file, and this is a folder",
    r"group or tensor_group": "quantization_config declares a group_size beside a strategy that has"
    " no groups",
    r"Cannot find any of (.+?) in the model's": "quantization_config lacks a key that {engine}"
    " needs: {0}",
    r"actorder='group'": "{engine} no longer reads weights whose groups follow the order of"
    " activations",
    r"MXFP8 requires input size divisible by 32": "MXFP8 has groups of 32 inputs, and a linear has"
    " another number of them",
    r"Marlin does not support group_size = (\S+)\.": "{engine}'s Marlin kernels do not serve groups"
    " of {0}",
    r"method (\S+) is not supported for the current GPU": "{engine} has no kernel for {0} on {gpu}",
    r"Unsupported data_type: (\S+),": "{engine} reads AutoRound's integers only, and"
    " quantization_config says {0}",
    r"Unsupported weight strategy=block": "{engine} has no kernel for INT8 weights in blocks",
    r"Unsupported weight_bits: (\S+),": "{engine} does not read AutoRound's weights of {0} bits",
    r"AWQ_TRITON_SUPPORTED_GROUP_SIZES": "{engine}'s AWQ kernel on {gpu} does not serve groups of"
    " this size",
    r"8 bits in a byte each want": "vLLM takes INT8 weights in compressed-tensors' int-quantized"
    " form only with 8-bit inputs",
    r"Unknown quantization method: gptq\.": "SGLang serves GPTQ only with symmetric values of 4 or"
    " 8 bits",
    r"Unknown quantization method: \.": "quantization_config has no quant_method, by which"
    " {engine} reads it",
    r"Unknown quantization method: (.+)\.": "{engine} does not know the quantization method {0}",
    r"Unknown ModelOpt quant algo: (\S*)": "vLLM does not read the algorithm {0} in ModelOpt's"
    " nested form",
    r"only supports regular FP8 quantization, but found '(\w+)'": "SGLang reads ModelOpt's FP8 only"
    " with one scale per tensor, and the folder declares {0}",
    r"ModelOpt currently only supports": "{engine} does not serve the algorithm that ModelOpt"
    " declares here",
    r"Cannot find any of \['quantization'\]": "SGLang finds no algorithm of ModelOpt here that it"
    " serves on {gpu}",
    r"(\w+) quantization is currently not supported in ROCm": "SGLang serves the quantization"
    " method {0} on NVIDIA GPUs only, not on {gpu}",
    r"method mxfp8 is not supported": "SGLang serves MXFP8 from Blackwell GPUs on, not on {gpu}",
    r"Found different quantization schemes for (?:the shards of )?(\[.*?\]|\S+?)\.? ": _PARTS,
    r"Fused module '(.+?)' requires consistent": _PARTS,
    r"not all shards of (\S+) are quantized": _PARTS,
    r"Unable to find matching target for (\S+)": "The declaration has no group for {0}, and SGLang"
    " wants one for every linear",
    r"No quark compatible scheme": "{engine} has no kernel for this combination of weights and"
    " activations in Quark's layout",
    r"No compressed-tensors compatible scheme": "{engine} has no kernel on {gpu} for this"
    " combination of weights and activations in the layout compressed-tensors",
    r"Multi-entry weight": "vLLM does not serve weights that Quark declares in two stages, such as"
    " INT4 of FP8",
    r"'list' object has no attribute 'get'": "SGLang does not read weights that Quark declares in"
    " two stages, such as INT4 of FP8",
    r"unhashable type: 'dict'": "SGLang does not read two stages of weights in MLA's fused linear",
    r"group_size must be a positive int": "vLLM serves Quark's INT4 in groups only, and these"
    " weights have one scale per channel",
    r"Unsupported activation quant key": "vLLM has no kernel for MXFP4 weights with FP8 activations"
    " per token",
    r"divisible by 128, got \((\d+), (\d+)\)": "vLLM's only kernel for INT4 weights with FP8"
    " activations takes sizes that are multiples of 128, and a linear has {0} inputs and {1}"
    " outputs",
    r"implement the ScaledMM": "vLLM has no kernel on {gpu} for FP8 weights with BF16 inputs",
    r"implement the MXFP4": "vLLM has no kernel on {gpu} for MXFP4 in the layout"
    " compressed-tensors",
    r"implement the WNA16": "vLLM has no kernel on {gpu} for integer weights of this format and"
    " size",
    r"Failed to find a kernel": "vLLM has no kernel on {gpu} for weights of this format and size",
    r"Marlin FP4 not available": "vLLM serves NVFP4 weights with BF16 inputs by its Marlin kernels,"
    " which run on NVIDIA GPUs only, not on {gpu}",
    r"Min capability: 89": "vLLM serves FP8 in Quark's layout only on GPUs with FP8 units, and"
    " {gpu} has none",
    r"named 'weight': 4 bits in a byte": "vLLM reads eight INT4 values from a 32-bit word, and this"
    " folder stores each value in a byte of its own",
    r"INC quantization with .* sym=False": "vLLM serves AutoRound with symmetric values only",
    r"group activation ordering": "vLLM no longer serves GPTQ whose inputs are ordered by"
    " activation (desc_act)",
    r"quantization config: bits=(\d), sym=(\w+)": "vLLM does not serve GPTQ with {0} bits and"
    " sym {1}",
    r"non-Marlin GPTQ CUDA kernel": "SGLang serves AutoRound with symmetric values only: it removed"
    " the kernel for others",
    r"gptq_marlin_repack": "SGLang has no kernel on {gpu} that repacks quantized weights with BF16"
    " inputs: its Marlin kernels run on NVIDIA GPUs only",
    r"'NoneType' object is not callable": "SGLang has no kernel on {gpu} for AutoRound's AWQ"
    " weights with zero points",
    r"negative dimension": "SGLang has no AWQ kernel on {gpu} for weights with one scale per"
    " channel",
    r"'NoneType' object is not subscriptable": "TensorRT-LLM reads compressed-tensors only where"
    " the inputs are quantized too, and this declaration leaves them in BF16",
    r"Unsupported quant_bits: 4": "TensorRT-LLM reads 4-bit weights of compressed-tensors only as"
    " NVFP4, not as INT4",
    r"weights_quant_strategy: tensor": "TensorRT-LLM reads FP8 weights of compressed-tensors only"
    " with one scale per channel or per block",
    r"inputs_quant_strategy: tensor": "TensorRT-LLM does not read FP8 inputs of compressed-tensors"
    " with one scale per tensor",
}
_OF_TENSORS = {
    r"'draft_id_to_target_id'": "The folder stores a vocabulary map (d2t), and config.json declares"
    " no smaller draft_vocab_size",
    r"no module or parameter named '(.+?)'": "The folder stores tensors under the name {0}, for"
    " which {engine}'s model has no parameter",
    r"has no parameter '.+' for checkpoint weight '(.+?)'": "The folder stores {0}, for which"
    " {engine}'s experts have no parameter",
    r"^KeyError: '(\w+)'": "config.json lacks the key {0}, which {engine} needs",
    r"^KeyError: '(.+)'": "The folder stores a tensor that {engine} looks for as {0}, and its model"
    " has no such parameter",
    r"not initialized from checkpoint: '(.+?)'": "{engine} wants the tensor {0}, which is not"
    " stored",
    r"Some parameters like (\S+) are not": "{engine} wants the tensor {0}, which is not stored",
    r"layer (\d+) weights missing": "vLLM looks for the MTP layer under model.layers.{0}, and no"
    " stored tensor has such a name",
    r"Downcasting not allowed": "SGLang expects FP8 values where the folder stores BF16 weights",
    r"Promotion for Float8": _DOWN + "one of them is stored as FP8 and the other one as BF16",
    r"to a parameter of size": "vLLM builds the confidence head without the Markov embedding, and"
    " the stored weight has room for it",
    r"Tried to load weights of size": "{engine} expects packed INT4 values where the folder stores"
    " a BF16 weight",
    r"The size of tensor a": "{engine} expects packed FP4 values where the folder stores a BF16"
    " head",
    r"Reduced-vocabulary .* include (lm_head|a d2t)": "vLLM serves a DSpark draft of fewer tokens"
    " with its own lm_head and with d2t only, and one of them is not stored",
    r"weight \(torch\.Size\(\[(\d+)\]\)\) into parameter \(torch\.Size\(\[(\d+)\]": "config.json"
    " declares a draft_vocab_size of {1}, and d2t has {0} rows",
    r"Attempted to load weight": "SGLang builds the Markov head for the whole vocabulary, and the"
    " stored one has fewer tokens",
    r"AssertionError: (\S+) is (\[.*?\]), its parameter (\[.*?\])": "The stored tensor {0} has the"
    " shape {1}, and {engine} expects {2}",
    r"layer\.weight\.shape == \(part_size_k": "{engine}'s Marlin kernel on {gpu} wants FP8 weights"
    " in another order than these are stored in",
    r"'QKVParallelLinear' object has no": "{engine} looks for a scale of q, k or v in their fused"
    " linear, which has none",
    r"shape '\[-1, \S+\]' is invalid": "A stored tensor cannot be divided into rows of the"
    " size that {engine} expects",
    r"KV-cache scale expects a scalar": "{engine} wants one scale of the KV cache per layer, and a"
    " stored one has several",
    r"AssertionError: (\S+) is (\[.*?\]), its parameter": "The stored tensor {0} has the shape {1},"
    " and {engine} expects another",
    r"org_vocab_size=(\d+).*\[output_dim\]=(\d+)": "config.json declares {0} tokens, and a stored"
    " table of the vocabulary has {1} rows",
    r"org_vocab_size": "A stored table of the vocabulary has another number of rows than"
    " config.json declares tokens",
    r"assert self\.data\.shape ==": "A stored scale has other axes than {engine}'s parameter:"
    " [out] for [out, 1], or the other way round",
    r"param_data\.shape == loaded_weight": "A stored tensor has another shape than the parameter"
    " that SGLang builds for it",
    r"zero-dimensional tensor": _DOWN + "scales of this format are single numbers without rows",
    r"param\.shape=torch\.Size\(\[1\]\)": _DOWN + "each of them has one scale of its own",
    r"param\.shape=torch\.Size\(\[2\]\)": _DOWN + "each of them has a stored shape of its own",
    r"must match except in dimension 0": _DOWN + "this format stores weights column by column",
    r"post_load_weights only supports float": "SGLang folds MLA's kv_b_proj into the attention, and"
    " needs it in BF16",
    r"has no attribute 'group_size'": "SGLang's Marlin kernel, which serves NVFP4 on {gpu}, does"
    " not serve a quantized head",
    r"index 1 is out of bounds": "SGLang keeps room for one static input scale in a fused linear,"
    " and each part has one",
    r"'ParallelLMHead' object has no attribute 'weight'": "vLLM compares the head's weight with the"
    " target's, and a head of packed integers has none",
    r"'output_size_per_partition'": "vLLM does not serve fc in MXFP4: its step after loading"
    " expects a linear that is shared by GPUs",
    r"`amd-quark` is required": "vLLM needs the package amd-quark to serve kv_b_proj in MXFP4",
    r"still NaN": "vLLM takes the head as NVFP4 by the declaration, and no head is stored",
    r"share one weight_global_scale": "SGLang wants one global scale for the parts of a fused NVFP4"
    " linear, and they have several",
    r"min_thread_[kn]": "SGLang's Marlin kernel takes multiples of 128 inputs and 64 outputs on"
    " each GPU, and a linear has others",
    r"% group_size|divisible by group_size|is not aligned|multiple of 16|group size 32": _GROUPS,
    r"by weight quantization|FP8_PB_WO requires": "A linear, or its share on one GPU, is not"
    " made of whole blocks of 128 x 128",
    r"exceeds dimension size": "vLLM fuses linears whose scales are in blocks of 128 rows, and one"
    " of them ends in the middle of a block",
}
MEANINGS = tuple(
    (re.compile(pattern), sentence)
    for table in (_OF_CONFIG, _OF_DECLARATIONS, _OF_TENSORS)
    for pattern, sentence in table.items()
)


def is_raw(text: str) -> bool:
    """Whether a reason is an error of Python's, which says nothing to whom reads it."""
    return _RAW.match(text) is not None


def meaning(text: str, *, engine: str, gpu: str) -> str | None:
    """What an error of an engine means; None where no row says it.

    Args:
        gpu: likewise, with its architecture.
    """
    for pattern, sentence in MEANINGS:
        if match := pattern.search(text):
            return sentence.format(*match.groups(), engine=engine, gpu=gpu)
    return None


def explained(text: str, *, engine: str, gpu: str) -> str:
    """A reason as a person reads it: what it means, then the engine's own text in brackets."""
    if not is_raw(text):
        return text
    said = meaning(text, engine=engine, gpu=gpu) or f"{engine} ends with an error of its own"
    return f"{said} [{text}]"
