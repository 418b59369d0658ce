"""Tiny random checkpoints, made by transformers with a seed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

VOCAB = 199
CONTEXT = 64


def tiny_config(family: str, **changes: Any) -> Any:
    """A transformers configuration of a few thousand parameters."""
    import transformers

    base = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if family == "Qwen3":
        base["head_dim"] = 16
    return getattr(transformers, f"{family}Config")(**{**base, **changes})


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A float32 model whose weights have std 1/sqrt(hidden): at 0.02 most bugs stay invisible."""
    import transformers

    config = tiny_config(family, **changes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, config.hidden_size**-0.5)
    return model


def tiny_tokenizer(directory: Path, vocab_size: int = VOCAB) -> None:
    """A word-level tokenizer with ids 0 .. vocab_size - 1, and <s>, </s> at 1 and 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    words = special + [f"w{index}" for index in range(vocab_size - len(special))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)


def save_tiny(directory: Path, family: str, seed: int = 0, **changes: Any) -> Any:
    """Write a checkpoint with its tokenizer to ``directory``; returns the transformers model."""
    shard_size = changes.pop("max_shard_size", "50MB")
    dtype = changes.pop("save_dtype", torch.float32)
    model = tiny_model(family, seed, **changes)
    round_parameters(model, dtype)
    copy.deepcopy(model).to(dtype).save_pretrained(directory, max_shard_size=shard_size)
    tiny_tokenizer(directory)
    return model


def round_parameters(model: Any, dtype: torch.dtype) -> None:
    """Give parameters values that ``dtype`` can hold; buffers (rope's frequencies) stay exact."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
