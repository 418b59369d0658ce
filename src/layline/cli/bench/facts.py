"""What must be known of a model before it is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFacts:
    """``context`` is the most tokens of prompt and answer together."""

    context: int
    has_tokenizer: bool


def facts_of(model: str) -> ModelFacts:
    """Read the configuration and vocabulary of ``model``, no weights. Raises LaylineError."""
    from layline.config import EngineConfig
    from layline.engine.facts import resolve_context
    from layline.models.registry import family_of
    from layline.text.tokenizer import AbsentTokenizer, load_tokenizer
    from layline.weights.opening import open_checkpoint

    checkpoint = open_checkpoint(model)
    try:
        config = family_of(checkpoint.config).parse(checkpoint.config)
        tokenizer = load_tokenizer(checkpoint)
    finally:
        checkpoint.close()
    return ModelFacts(
        context=resolve_context(EngineConfig(model=model), config),
        has_tokenizer=not isinstance(tokenizer, AbsentTokenizer),
    )
