"""Model cases that cover every family and rope variant, and the transformers reference."""

from __future__ import annotations

from typing import Any

import torch

from support.tiny import VOCAB

PROMPT_LENGTHS = (1, 5, 17, 30)
NEW_TOKENS = 14
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.3,
        "mscale_all_dim": 0.6,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 0.8,
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("Llama", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3-bias": ("Qwen3", {"attention_bias": True}),
    "qwen3-window": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    **{f"llama-rope-{name}": ("Llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "qwen2-rope-yarn": ("Qwen2", {"rope_parameters": ROPES["yarn"]}),
    "qwen3-rope-linear": ("Qwen3", {"rope_parameters": ROPES["linear"]}),
}


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def reference(model: Any, prompt: list[int], new_tokens: int) -> tuple[torch.Tensor, list[int]]:
    """Logits of the prompt and of each greedy step, every step a full pass without a cache."""
    ids = list(prompt)
    logits = model(torch.tensor([ids], device=model.device)).logits[0]
    rows = [logits]
    for _ in range(new_tokens - 1):
        ids.append(int(logits[-1].argmax()))
        logits = model(torch.tensor([ids], device=model.device)).logits[0]
        rows.append(logits[-1:])
    ids.append(int(logits[-1].argmax()))
    return torch.cat(rows), ids[len(prompt) :]
