"""A tiny model that can write anything: its vocabulary has every byte, and a template for tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.tiny import tiny_model

WORDS = [
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
    "The harbour was quiet before the morning ferries. In 2024 they carried 1234567 people.",
    "Ein schöner Tag über den Dächern. Здравствуйте! 你好 👋🏽",
    "<tool_call>\n\n</tool_call> [TOOL_CALLS] [true, false, null] parameters required",
]
TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = 2
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "Answer with <tool_call>{...}</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS]").replace("</tool_call>", "")
LLAMA = HERMES.replace("<tool_call>", "<|python_tag|>").replace("</tool_call>", "")
PYTHONIC = (
    HERMES.replace("<tool_call>{...}</tool_call>", "[func(key=value)]")
    .replace("<tool_call>", "")
    .replace("</tool_call>", "")
)
TEMPLATES = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA, "pythonic": PYTHONIC}


def save_writer(directory: Path, template: str = HERMES, context: int = 2048) -> Any:
    """A random checkpoint of some 400 byte-level tokens; returns the transformers model."""
    size = save_vocabulary(directory, template)
    model = tiny_model(
        "Llama",
        vocab_size=size,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=END,
    )
    model.save_pretrained(directory)
    return model


def save_vocabulary(directory: Path, template: str) -> int:
    """Byte-level BPE with ``TURNS`` and, where the template has it, [TOOL_CALLS] as special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = [mark for mark in ("[TOOL_CALLS]", "<|python_tag|>") if mark in template]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[*TURNS, *marks],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(WORDS, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=TURNS[0], eos_token=TURNS[END]
    ).save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "chat_template": template}), encoding="utf-8")
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    size: int = backend.get_vocab_size()
    return size
