"""Tiny random models of mlx_lm's own classes, and what the adapter does with each.

test_architectures.py checks these tables, docs/architectures.md shows them.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

VOCABULARY = 64
ALL, FULL, ATTENTION = "all", "full attention", "attention, with `partial=True`"

# from_dict takes what a model's arguments know.
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "use_bias": False,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "sliding_window": 32,
}  # fmt: skip
GPT = {
    "n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 48, "n_ctx": 512, "n_positions": 512,
    "layer_norm_epsilon": 1e-5, "num_key_value_heads": 4,
}  # fmt: skip
MIXED = {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}
EXAONE4 = MIXED | {"sliding_window_pattern": "LG", "rope_scaling": {"rope_type": "default"}}
EVERY_SECOND = {"num_hidden_layers": 4, "sliding_window_pattern": 2}
SLIDING_FIRST = MIXED | {"layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED = SLIDING_FIRST | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY}
GEMMA3N = SHARED | {
    "hidden_size_per_layer_input": 8, "altup_num_inputs": 2, "altup_coef_clip": 120.0,
    "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 8, "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0, "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip
GEMMA4 = SHARED | {
    "hidden_size_per_layer_input": 8, "global_head_dim": 16,
    "rope_parameters": {k: {"rope_theta": 1e4} for k in ("full_attention", "sliding_attention")},
}  # fmt: skip
GRANITE = {
    "logits_scaling": 8.0, "attention_multiplier": 0.2, "embedding_multiplier": 12.0,
    "residual_multiplier": 0.2,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 2, "n_routed_experts": 4, "n_shared_experts": 1, "num_key_value_heads": 4,
    "rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512},
    "dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 1.0,
}  # fmt: skip
STATE_SPACE = {"state_size": 8, "conv_kernel": 4, "use_conv_bias": True, "time_step_rank": 4}
JAMBA = {
    "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
    "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2, "num_hidden_layers": 4,
}  # fmt: skip
LINEAR = {
    "num_hidden_layers": 4, "full_attention_interval": 2, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 16,
    "mlp_only_layers": [], "partial_rotary_factor": 0.5,
}  # fmt: skip

MINISTRAL3 = {
    "rope_parameters": {
        "rope_theta": 1e4, "rope_type": "default", "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip
MISTRAL3 = {"text_config": SIZES | MINISTRAL3 | {"model_type": "ministral3"}}
GEMMA3 = {"text_config": SIZES | EVERY_SECOND | {"model_type": "gemma3_text"}}

OWN_CODE = "attends with code of its own"
SHARED_KEYS = "attends to keys of one layer in several"
TWO_PART = "rotates only the last part of a key"
NO_ROPE = "needs the one rotary embedding of each layer"


class Architecture(NamedTuple):
    """One file of mlx_lm, what to build of it, and what the adapter does with it."""

    name: str
    args: Mapping[str, Any] = MappingProxyType({})
    layers: str = ALL  # which of them get an H2O cache
    true_queries: bool = True
    rolling: str = ""  # why not
    ragged: str = ""  # why layers and heads can't hold different numbers of tokens
    mass: float | None = 1.0  # that one token adds per head; None: sink logits take some
    note: str = ""


class Refused(NamedTuple):
    """A file of mlx_lm that H2O can't serve, and what the adapter says."""

    name: str
    args: Mapping[str, Any]
    why: str


ARCHITECTURES = (
    Architecture("llama", note="also Mistral"),
    Architecture("llama", MIXED, FULL, note="with sliding-window layers"),
    Architecture("cohere", {"use_qk_norm": True}),
    Architecture("cohere2", EVERY_SECOND, FULL, rolling="does not rotate the keys of these layers"),
    Architecture("deepseek_v2", LATENT, rolling=TWO_PART, note="mlx_lm caches whole keys"),
    Architecture("ernie4_5"),
    Architecture("exaone4", EXAONE4, FULL, rolling=NO_ROPE, note="full attention has no rotation"),
    Architecture("gear", MIXED, FULL),
    Architecture("gear", MIXED | {"attn_logit_softcapping": 50.0}, FULL, true_queries=False, ragged=OWN_CODE,
                 note="with capped logits"),
    Architecture("gemma"),
    Architecture("gemma2", true_queries=False, ragged=OWN_CODE, note="caps its logits"),
    Architecture("gemma3", GEMMA3, FULL, note="around gemma3_text"),
    Architecture("gemma3_text", EVERY_SECOND, FULL),
    Architecture("gemma3n", GEMMA3N, FULL, rolling="rotates every layer by the first one's offset",
                 ragged=SHARED_KEYS, mass=2.0,
                 note="layers that share keys all count"),
    Architecture("gemma4_text", GEMMA4, FULL, ragged=SHARED_KEYS,
                 note="of layers that share keys the first one counts"),
    Architecture("glm4", {"partial_rotary_factor": 0.5}),
    Architecture("gpt2", GPT, rolling="has learned positions"),
    Architecture("gpt_bigcode", GPT | {"num_key_value_heads": 1}, rolling="has learned positions"),
    Architecture("gpt_neox", {"rotary_emb_base": 10000, "rotary_pct": 0.25}),
    Architecture("gpt_oss", MIXED, FULL, mass=None, note="sink logits take part of the attention"),
    Architecture("granite", GRANITE),
    Architecture("hunyuan_v1_dense", rolling="scales keys after their rotation"),
    Architecture("iquestloopcoder", {"loop_window_size": 32}, FULL, rolling=NO_ROPE, ragged=SHARED_KEYS,
                 note="runs each layer twice"),
    Architecture("jamba", JAMBA, ATTENTION, rolling=NO_ROPE, note="attention has no rotation"),
    Architecture("minicpm3", LATENT, rolling=TWO_PART, note="mlx_lm caches whole keys"),
    Architecture("ministral3", MINISTRAL3 | MIXED, FULL, rolling="scales queries by their position",
                 note="with sliding-window layers"),
    Architecture("mistral3", MISTRAL3, rolling="scales queries by their position",
                 note="around ministral3; around llama as llama"),
    Architecture("mixtral"),
    Architecture("nanochat", rolling=NO_ROPE, note="rotates with code of its own"),
    Architecture("nemotron", {"hidden_act": "relu2"}),
    Architecture("olmo2"),
    Architecture("olmo3", MIXED, FULL),
    Architecture("phi", {"partial_rotary_factor": 0.5}),
    Architecture("phi3"),
    Architecture("qwen2"),
    Architecture("qwen3"),
    Architecture("qwen3_next", LINEAR, ATTENTION),
    Architecture("smollm3", {"no_rope_layer_interval": 2}, rolling="can't be moved to other positions",
                 note="every fourth layer has no rotation"),
    Architecture("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.25}),
    Architecture("starcoder2"),
)  # fmt: skip
REFUSED = (
    Refused("afm7", {"hidden_dim": 32, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4,
                     "num_kv_heads": 2}, "takes a row's place in the cache for its position"),
    Refused("deepseek_v3", LATENT, "keeps latent keys"),
    Refused("falcon_h1", {}, "no layer of falcon_h1 has a full attention cache"),
    Refused("mamba", STATE_SPACE, "no layer of mamba has a full attention cache"),
)  # fmt: skip


def build(name: str, args: Mapping[str, Any]) -> nn.Module:
    """Make the random model."""
    module = import_module(f"mlx_lm.models.{name}")
    known = SIZES | {"model_type": name} | dict(args)
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict({"text_config": known} | known))
    # Nothing stays a zero or a one: sink logits and norms start as such.
    model.update(tree_map(lambda p: p + 0.1 * mx.random.normal(p.shape), model.parameters()))
    mx.eval(model.parameters())
    return model
