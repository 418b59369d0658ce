"""What OpenAI's API has and this server does not, refused in one place."""

from __future__ import annotations

from layline.serve.problems import ApiError, invalid
from layline.serve.requests import ChatRequest, CompletionRequest


def refuse_chat(body: ChatRequest) -> None:
    """Raise ApiError for a field that asks a chat answer for what is not there."""
    refuse_tools(body)
    if body.modalities is not None and body.modalities != ["text"]:
        raise unsupported("modalities", "answers are text; expected ['text']")
    if body.audio is not None:
        raise unsupported("audio", "answers are text; leave it out")


def refuse_tools(body: ChatRequest) -> None:
    """Raise ApiError for what is said of tools that are not there, and for the older functions."""
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise invalid("'tool_choice' is only allowed when 'tools' are specified.", "tool_choice")
    if body.functions and body.function_call != "none":
        raise unsupported("functions", "it is the older form of 'tools'; use those")
    if body.function_call not in (None, "none", "auto"):
        raise unsupported("function_call", "it is the older form of 'tool_choice'; use that")


def refuse_completion(body: CompletionRequest) -> None:
    """Raise ApiError for a field that asks a completion for what is not there."""
    choices = body.n or 1
    if body.best_of is not None and body.best_of != choices:
        raise unsupported("best_of", f"answers are not ranked; expected {choices}, which is n")
    if body.suffix:
        raise unsupported("suffix", "text is not inserted; leave it out")


def refuse_embeddings(model: str) -> ApiError:
    """The answer of /v1/embeddings where the model makes none."""
    return ApiError(
        400,
        f"The model '{model}' generates text and makes no embeddings.",
        param="model",
        code="model_not_supported",
    )


def refuse_text(model: str) -> ApiError:
    """The answer to who asks a model for text that makes embeddings."""
    return ApiError(
        400,
        f"The model '{model}' makes embeddings and generates no text; use /v1/embeddings.",
        param="model",
        code="model_not_supported",
    )


def unsupported(name: str, told: str) -> ApiError:
    """The refusal of one field."""
    return invalid(f"'{name}' is not supported here: {told}.", name, "unsupported_parameter")
