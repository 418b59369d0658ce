"""``layline chat``: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from layline.cli import session
from layline.cli.input import require_stdin, stdin_bytes, utf8
from layline.cli.options import ChatSamplingOptions, ModelArgument, ModelOption, RunOptions
from layline.cli.output import note, write
from layline.cli.values import closest
from layline.config import DEFAULT_MODEL
from layline.errors import LaylineError, PromptError

if TYPE_CHECKING:
    from layline.engine.llm import LLM
    from layline.sampling import SamplingParams

WATCH_S = 0.5
"""How often the model's ranks are looked at while a line is read."""
COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation, keep the system text",
    "/system TEXT": "set the system text; without TEXT, remove it",
    "/exit": "leave (so does Ctrl-D); Ctrl-C stops an answer",
}


def chat(
    sampling: ChatSamplingOptions,
    run: RunOptions,
    argument: ModelArgument = None,
    model: ModelOption = None,
) -> int:
    """Talk with a model. /help lists the commands."""
    status = session.follow()
    if status is not None:
        return status
    params = sampling.params()
    require_stdin("messages there, from a terminal or a pipe")
    name = session.chosen_model(argument, model, DEFAULT_MODEL)
    with session.open_llm(name, run) as llm:
        if llm.tokenizer.chat_template is None:
            raise PromptError(
                f"model {name!r} has no chat template; expected one in its tokenizer files, "
                "or use: layline generate"
            )
        return Conversation(llm, params).run(name)


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.llm = llm
        self.params = params
        self.system: str | None = None
        self.turns: list[dict[str, str]] = []
        self.interruption = Interruption()
        self.refused = False

    def run(self, name: str) -> int:
        """Read lines until the end of input or /exit. Returns the exit status.

        A person saw that a message was refused; a script learns it from the status.
        """
        interactive = sys.stdin.isatty()
        if interactive:
            # Line editing and history come with the import, where the platform has them.
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401
            note(f"{name} · /help for commands")
        with self.interruption.installed(), watching(self.llm.failure, self.interruption):
            for line in self.interruption.lines(interactive):
                if not self.obey(line):
                    break
        return 2 if self.refused and not interactive else 0

    def obey(self, line: str) -> bool:
        """Carry out a line: a /command or a message. False means leave."""
        try:
            utf8(line.encode("utf-8", errors="surrogateescape"), "the message")
        except PromptError as error:
            self.refuse(error)
            return True
        if line.startswith("/"):
            return self.command(line.strip())
        if line.strip():
            self.reply(line)
        return True

    def refuse(self, error: PromptError, advice: str = "") -> None:
        """Say why a line was left out of the conversation."""
        self.refused = True
        note(f"layline: {' '.join(str(error).split())}{advice}")

    def command(self, line: str) -> bool:
        """Carry out a /command. False means leave."""
        word, _, rest = line.partition(" ")
        if word == "/exit":
            return False
        if word == "/reset":
            self.turns.clear()
            note("[conversation cleared]")
        elif word == "/system":
            self.system = rest.strip() or None
            note("[system text set]" if self.system else "[system text removed]")
        elif word == "/help":
            for name, meaning in COMMANDS.items():
                note(f"{name:<13} {meaning}")
        else:
            known = [name.split()[0] for name in COMMANDS]
            note(f"unknown command {word!r}; expected {', '.join(known)}{closest(word, known)}")
        return True

    def messages(self) -> list[dict[str, str]]:
        """The conversation as the chat template gets it."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]

    def reply(self, line: str) -> None:
        """Answer ``line``. What was printed before Ctrl-C stays part of the conversation."""
        self.turns.append({"role": "user", "content": line})
        try:
            text, end = self.stream_answer()
        except PromptError as error:
            # The message was never answered, and leaving it in would refuse every later one too.
            self.turns.pop()
            self.refuse(error, "; /reset clears the conversation" if self.turns else "")
            return
        self.turns.append({"role": "assistant", "content": text})
        if not text.endswith("\n"):
            write("\n")
        if end == "stopped":
            note("[stopped]")
        elif end == "length":
            note("[cut off: the token limit of --max-tokens or the context was reached]")

    def stream_answer(self) -> tuple[str, str | None]:
        """Print the answer as it comes. Returns its text and the finish reason or "stopped"."""
        pieces: list[str] = []
        end: str | None = None
        with self.interruption.during("answering"):
            chunks = self.llm.stream_chat(self.messages(), self.params)
            try:
                for chunk in chunks:
                    pieces.append(chunk.text)
                    write(chunk.text)
                    end = chunk.finish_reason or end
                    if self.interruption.asked:
                        break
            except KeyboardInterrupt:
                end = None
            finally:
                close_stream(chunks)
            if self.interruption.asked and end is None:
                end = "stopped"
        return "".join(pieces), end


def close_stream(chunks: Iterator[Any]) -> None:
    """End a stream early, which frees what its request holds in the engine."""
    close = getattr(chunks, "close", None)
    if close is not None:
        close()


@contextlib.contextmanager
def watching(failure: Callable[[], LaylineError | None], prompt: Interruption) -> Iterator[None]:
    """Look for a failure of the model while the block reads lines, and end the reading with it.

    Nothing else would notice that a rank is gone before the next message. An answer that is being
    made ends with the error by itself.
    """
    over = threading.Event()
    reader = threading.get_ident()

    def watch() -> None:
        while not over.wait(WATCH_S):
            prompt.failure = prompt.failure or failure()
            # Again and again: a signal just before the wait for a key is seen after it only.
            if prompt.failure is not None and prompt.state == "reading":
                signal.pthread_kill(reader, signal.SIGINT)

    watcher = threading.Thread(target=watch, name="layline-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


class Interruption:
    """What Ctrl-C means, which depends on what the conversation is doing.

    While an answer is made, the first one only sets a flag, so that no step of the engine is cut
    in half; the second raises KeyboardInterrupt, for a first token that takes too long. While a
    line is read it raises at once. Between the two it does nothing: it came too late to stop
    anything, and must not end the session.
    """

    def __init__(self) -> None:
        self.state = "idle"
        self.asked = False
        self.failure: LaylineError | None = None

    @contextlib.contextmanager
    def during(self, state: str) -> Iterator[None]:
        """Mark the block as "answering" or "reading"."""
        self.asked = False
        self.state = state
        try:
            yield
        finally:
            self.state = "idle"

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT here for the length of the block."""
        previous = signal.signal(signal.SIGINT, self.handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def handle(self, *_: object) -> None:
        """The signal handler."""
        if self.state == "reading" or (self.state == "answering" and self.asked):
            raise KeyboardInterrupt
        self.asked = True

    def lines(self, interactive: bool) -> Iterator[str]:
        """Lines of stdin. Ctrl-C at the prompt drops the line, Ctrl-D ends the conversation.

        Raises the failure of the model that was noticed while a line was waited for.
        """
        while True:
            try:
                with self.during("reading"):
                    line = input("> ") + "\n" if interactive else piped_line()
            except KeyboardInterrupt:
                if self.failure is not None:
                    if interactive:
                        note("")
                    raise type(self.failure)(*self.failure.args) from self.failure
                if not interactive:
                    raise
                note("\n[/exit or Ctrl-D leaves]")
                continue
            except EOFError:
                note("")
                return
            if not line:
                return
            yield line.rstrip("\r\n")


def piped_line() -> str:
    """The next line of stdin; bytes that are not UTF-8 are escaped, to be refused by name."""
    return stdin_bytes().readline().decode("utf-8", errors="surrogateescape")
