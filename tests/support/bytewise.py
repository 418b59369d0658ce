"""A tiny checkpoint whose tokens are single bytes, so that most are parts of characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.tiny import tiny_model

END = 256
VOCAB = 257


def save_bytewise(directory: Path) -> Any:
    """Write it; returns the transformers model. Token i is byte i, and 256 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from layline.text.vocabulary import byte_alphabet

    vocabulary = dict(byte_alphabet())
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    model = tiny_model("Llama", vocab_size=VOCAB, eos_token_id=END, max_position_embeddings=256)
    model.save_pretrained(directory)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    wrapped.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    wrapped.save_pretrained(directory)
    return model
