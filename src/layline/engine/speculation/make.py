"""What a configuration says about speculation, made into what runs it. No torch here."""

from __future__ import annotations

from layline.config import EngineConfig
from layline.engine.balance import MeshScheduler, StepRules
from layline.engine.facts import ServedModel
from layline.engine.speculation.draft import DraftExecutor, DraftProposer
from layline.engine.speculation.ngram import NgramProposer
from layline.engine.speculation.proposer import Proposer
from layline.engine.speculation.speculation import Speculation


def make_speculation(
    engine: EngineConfig, model: ServedModel, scheduler: MeshScheduler, executor: DraftExecutor
) -> Speculation | None:
    """The speculation that ``engine`` asks for; None where it is off."""
    proposer: Proposer
    if engine.speculative == "ngram":
        proposer = NgramProposer()
    elif model.draft is not None:
        proposer = DraftProposer(model.draft, scheduler, executor, StepRules.of(engine))
    else:
        return None
    return Speculation(proposer, scheduler, engine.speculative_tokens)
