"""What is settled about a draft model before any weight is read. No torch here."""

from __future__ import annotations

from dataclasses import replace

from layline.boundary.policy import resolve_draft_policy
from layline.config import EngineConfig
from layline.engine.facts import ModelFacts, ServedModel, resolve
from layline.errors import UsageError
from layline.models.registry import family_of
from layline.text.tokenizer import Tokenizer, load_tokenizer
from layline.weights.checkpoint import Checkpoint
from layline.weights.opening import open_checkpoint


def with_draft(engine: EngineConfig, model: ServedModel) -> ServedModel:
    """``model`` with the facts of the draft model that ``engine`` names, where it names one.

    Raises UsageError or CheckpointError for one that does not fit the model or the mesh.
    """
    if engine.speculative != "draft":
        return model
    checkpoint = open_draft(engine)
    try:
        draft = resolve_draft(engine, checkpoint, model.facts)
        require_same_vocabulary(engine, model.tokenizer, load_tokenizer(checkpoint))
    finally:
        checkpoint.close()
    needed, found = model.valid_vocab, draft.config.vocab_size
    if found < needed:
        raise UsageError(
            f"speculative_model {engine.speculative_model!r} scores {found} ids, but the model's "
            f"vocabulary has {needed}; expected a draft model with at least as many"
        )
    return replace(model, draft=draft)


def draft_facts(engine: EngineConfig, target: ModelFacts) -> ModelFacts | None:
    """The facts of the draft model that ``engine`` names, None where it names none.

    Raises UsageError or CheckpointError for one that the mesh does not divide.
    """
    if engine.speculative != "draft":
        return None
    checkpoint = open_draft(engine)
    try:
        return resolve_draft(engine, checkpoint, target)
    finally:
        checkpoint.close()


def open_draft(engine: EngineConfig) -> Checkpoint:
    """The draft model's checkpoint. Raises CheckpointError."""
    assert engine.speculative_model is not None, "the configuration was checked"
    return open_checkpoint(engine.speculative_model, seed=engine.seed)


def resolve_draft(engine: EngineConfig, checkpoint: Checkpoint, target: ModelFacts) -> ModelFacts:
    """The facts of the draft model ``checkpoint`` beside ``target``, on the same mesh.

    Raises UsageError for a model that the mesh does not divide, or a policy that does not exist.
    """
    architecture = family_of(checkpoint.config).parse(checkpoint.config).architecture
    policy, reason = resolve_draft_policy(
        engine.speculative_boundary_reduction, engine.boundary_reduction, architecture
    )
    alone = replace(
        engine,
        model=str(engine.speculative_model),
        boundary_reduction=policy.value,
        max_model_len=None,
        speculative="off",
        speculative_model=None,
        speculative_boundary_reduction=None,
    )
    try:
        facts = resolve(alone, checkpoint)
    except UsageError as error:
        name = engine.speculative_model
        raise type(error)(f"speculative_model {name!r} does not fit: {error}") from None
    return replace(
        facts,
        policy_reason=reason,
        max_model_len=min(facts.max_model_len, target.max_model_len),
        spec=replace(facts.spec, topology=target.spec.topology),
    )


def require_same_vocabulary(engine: EngineConfig, target: Tokenizer, draft: Tokenizer) -> None:
    """Raise UsageError unless both give the same tokens the same ids."""
    ours, theirs = target.token_ids(), draft.token_ids()
    if ours is None or theirs is None:
        # Of random weights for a configuration, no more than their number is known.
        if target.vocab_size == draft.vocab_size:
            return
        difference = f"{draft.vocab_size} ids where the model has {target.vocab_size}"
    elif ours == theirs:
        return
    else:
        difference = _difference(ours, theirs)
    raise UsageError(
        f"speculative_model {engine.speculative_model!r} has another vocabulary: {difference}; "
        "expected a draft model with the model's own tokenizer"
    )


def _difference(ours: dict[str, int], theirs: dict[str, int]) -> str:
    """The lowest id that stands for different tokens."""
    by_id = [{token_id: token for token, token_id in each.items()} for each in (ours, theirs)]
    token_id = min(token_id for _, token_id in ours.items() ^ theirs.items())
    mine, other = (each.get(token_id) for each in by_id)
    return f"id {token_id} is {_named(other)} in it and {_named(mine)} in the model"


def _named(token: str | None) -> str:
    return "no token" if token is None else repr(token)
