"""Chat templates: a conversation to the text that the model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layline.errors import PromptError
from layline.text.limits import Limits

if TYPE_CHECKING:
    from layline.text.sandbox import ChatEnvironment

_LONGEST_MESSAGE = 300


class ChatTemplate:
    """The chat templates of one checkpoint, compiled when first used.

    Args:
        sources: template source by name; "tool_use" is taken when tools are given and it exists,
            otherwise "default".
        names: what templates know as ``bos_token``, ``eos_token`` and so on.
        limits: what one rendering may use.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        names: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.sources = dict(sources)
        self.names = dict(names or {})
        self._limits = limits or Limits()
        self._environment: ChatEnvironment | None = None
        self._prepared: dict[str, Any] = {}
        self._takes_tools: bool | None = None

    @property
    def tools_source(self) -> str:
        """The source of the template that is taken when there are tools."""
        return self.sources.get("tool_use", self.sources.get("default", ""))

    @property
    def takes_tools(self) -> bool:
        """Whether that template reads the functions that the model may call."""
        if self._takes_tools is None:
            self._takes_tools = _reads_tools(self.tools_source)
        return self._takes_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_vars: Any,
    ) -> str:
        """The text of ``messages``.

        Args:
            messages: dicts with "role" and "content"; content is a string, or a list of
                {"type": "text", "text": ...} whose texts are joined. It may be missing where a
                message has "tool_calls".
            tools: JSON schemas of functions the model may call.
            add_generation_prompt: end with the beginning of the assistant's answer.
            template_vars: anything else a template reads, such as ``enable_thinking``.

        Raises:
            PromptError: malformed messages, or a template that refuses them, fails, or uses more
                than one rendering may.
        """
        if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
            raise PromptError("tools must be a list of JSON schemas, each of them an object")
        variables = {
            **self.names,
            **_plain(template_vars, "template variable"),
            "messages": checked_messages(messages),
            "tools": None if tools is None else _plain(list(tools), "tools"),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._run(self._choose(with_tools=bool(tools)), variables)

    def _choose(self, *, with_tools: bool) -> str:
        if with_tools and "tool_use" in self.sources:
            return "tool_use"
        if "default" in self.sources:
            return "default"
        raise PromptError(
            "none of this checkpoint's chat templates is the default one; it has "
            f"{', '.join(sorted(self.sources))}"
        )

    def _run(self, name: str, variables: Mapping[str, Any]) -> str:
        from layline.text.sandbox import ChatEnvironment, RefusedError

        try:
            if self._environment is None:
                self._environment = ChatEnvironment(self._limits)
            if name not in self._prepared:
                self._prepared[name] = self._environment.prepare(self.sources[name])
            return self._environment.render(self._prepared[name], variables)
        except RefusedError as error:
            raise PromptError(f"the chat template refuses these messages: {_line(error)}") from None
        except Exception as error:  # a template can raise anything Python can
            raise PromptError(f"the chat template failed: {_line(error)}") from None


def _reads_tools(source: str) -> bool:
    from jinja2 import meta
    from jinja2.exceptions import TemplateError

    from layline.text.sandbox import ChatEnvironment

    if "tools" not in source or len(source) > Limits.source:
        return False
    try:
        tree = ChatEnvironment(Limits()).parse(source)
        return "tools" in meta.find_undeclared_variables(tree)
    except (TemplateError, RecursionError):
        return False


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as plain data: text parts joined, entries that are None left out.

    Raises:
        PromptError: what is wrong, with the number of the message.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise PromptError(
            f"messages is {type(messages).__name__}; expected a list of objects with role and "
            "content"
        )
    if not messages:
        raise PromptError("messages is empty; expected at least one message")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(
            f"{where} is {type(message).__name__}; expected an object with role and content"
        )
    plain: dict[str, Any] = {
        key: value for key, value in _plain(message, where).items() if value is not None
    }
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise PromptError(f"{where}.role is {role!r}; expected a name such as 'user'")
    content = plain.get("content")
    if content is None:
        if "tool_calls" not in plain:
            raise PromptError(f"{where} has no content; expected a string or a list of text parts")
    elif isinstance(content, list):
        plain["content"] = "".join(
            _text_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)
        )
    elif not isinstance(content, str):
        raise PromptError(
            f"{where}.content is {type(content).__name__}; expected a string or a list of text "
            "parts"
        )
    return plain


def _text_part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise PromptError(
            f"{where} is of type {kind!r}; only {{'type': 'text', 'text': '...'}} is read"
        )
    return text


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy out of JSON types alone: a template must not get hold of objects with methods."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if depth > 64:
        raise PromptError(f"{where} is nested more than 64 deep")
    if isinstance(value, Mapping):
        return {_plain(k, where, depth + 1): _plain(v, where, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    # Enumerations and other subclasses, back to the type they extend.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise PromptError(
        f"{where} holds a {type(value).__name__}; expected text, numbers, lists and objects"
    )


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 3] + "..."
