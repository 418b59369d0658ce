"""Which optional output transports an FFN may use. Nothing here imports torch."""

from __future__ import annotations

from enum import Enum

from layline.errors import UsageError, one_of

AUTO = "auto"


class ReductionPolicy(Enum):
    """Permissions, not commands: what is not eligible falls back to the all-reduce path."""

    AR = "ar"
    RS = "rs"
    RSV = "rsv"
    RS_RSV = "rs+rsv"

    @property
    def allows_scatter(self) -> bool:
        """True when a fixed-size reduce-scatter may be used."""
        return self in (ReductionPolicy.RS, ReductionPolicy.RS_RSV)

    @property
    def allows_variable_scatter(self) -> bool:
        """True when a variable-size reduce-scatter may be used."""
        return self in (ReductionPolicy.RSV, ReductionPolicy.RS_RSV)


POLICIES = (AUTO, *(policy.value for policy in ReductionPolicy))
# What ``auto`` means, by architecture; every other one takes DEFAULT.
DEFAULT = ReductionPolicy.RS_RSV
BY_ARCHITECTURE = {
    "Qwen3ForCausalLM": ReductionPolicy.AR,
    "LongcatFlashForCausalLM": ReductionPolicy.RSV,
}


def resolve_policy(asked: str, architecture: str) -> tuple[ReductionPolicy, str]:
    """The policy for a checkpoint of this architecture, and in words where it comes from.

    Raises UsageError for a policy that does not exist.
    """
    if asked not in POLICIES:
        raise UsageError(one_of("boundary_reduction", asked, POLICIES))
    if asked != AUTO:
        return ReductionPolicy(asked), "asked for"
    policy = BY_ARCHITECTURE.get(architecture)
    if policy is None:
        return DEFAULT, f"auto: the default for architectures such as {architecture}"
    return policy, f"auto: the table's choice for {architecture}"


def resolve_draft_policy(
    speculative: str | None, asked: str, architecture: str
) -> tuple[ReductionPolicy, str]:
    """The policy of a separate draft checkpoint, and in words where it comes from.

    ``speculative`` is ``speculative_boundary_reduction``, None where it was not given: then an
    explicit ``asked`` for the target holds for the draft too, and ``auto`` goes by the draft's own
    architecture. Raises UsageError for a policy that does not exist.
    """
    if speculative is not None and speculative not in POLICIES:
        raise UsageError(one_of("speculative_boundary_reduction", speculative, POLICIES))
    return resolve_policy(asked if speculative is None else speculative, architecture)
