"""``layline serve``: an OpenAI-compatible server for one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layline.cli import session
from layline.cli.options import ModelArgument, ModelOption, RunOptions, choice_option
from layline.cli.output import write_line
from layline.cli.values import integer, seconds, size
from layline.config import (
    DEFAULT_MODEL,
    EngineConfig,
    api_keys_environment,
    door_environment,
    shorten,
)
from layline.errors import UsageError
from layline.serve.hosts import ANY, host_of
from layline.serve.settings import TOOL_PARSERS, ServeSettings

if TYPE_CHECKING:
    import socket

    from layline.engine.llm import LLM
    from layline.engine.pipeline_plan import PipelinePlan
    from layline.engine.planned import ModelPlan

LOG_LEVELS = ("debug", "info", "warning", "error")
NEEDED = ("starlette", "uvicorn", "prometheus_client", "llguidance")


def count(flag: str, meaning: str, shown: str | None = None) -> Any:
    """The option of a number of at least one."""
    parser = integer(flag, minimum=1)
    default: Any = True if shown is None else shown
    return typer.Option(flag, parser=parser, metavar="INT", help=meaning, show_default=default)


def duration(flag: str, meaning: str) -> Any:
    """The option of a number of seconds."""
    return typer.Option(flag, parser=seconds(flag), metavar="SECONDS", help=meaning)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where the server listens, whom it answers and what it refuses."""

    host: Annotated[str, typer.Option("--host", metavar="HOST", help="address to listen on")] = (
        ServeSettings.host
    )
    port: Annotated[
        int,
        typer.Option(
            "--port",
            parser=integer("--port", minimum=0, maximum=65535),
            metavar="INT",
            help="port to listen on; 0 takes any free one",
        ),
    ] = ServeSettings.port
    served_model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="what requests call the model",
            show_default="MODEL, of a path its last part",
        ),
    ] = None
    tool_parser: Annotated[
        str,
        choice_option(
            "--tool-parser",
            TOOL_PARSERS,
            "how the model writes calls of functions; auto looks at its chat template",
        ),
    ] = ServeSettings.tool_parser
    api_key: Annotated[
        list[str],
        typer.Option("--api-key", metavar="KEY", help="a key that is let in; repeatable"),
    ] = field(default_factory=list)
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", metavar="FILE", help="a file with a key on each line"),
    ] = None
    requests_per_minute: Annotated[
        int | None, count("--requests-per-minute", "most requests of a key", "no limit")
    ] = None
    tokens_per_minute: Annotated[
        int | None,
        count("--tokens-per-minute", "most prompt and answer tokens of a key", "no limit"),
    ] = None
    cors_origin: Annotated[
        list[str],
        typer.Option("--cors-origin", metavar="ORIGIN", help="a site that may ask; repeatable"),
    ] = field(default_factory=list)
    allowed_host: Annotated[
        list[str],
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="a name that clients may call the server by; repeatable",
            show_default="names and addresses of this machine",
        ),
    ] = field(default_factory=list)
    max_body: Annotated[
        int,
        typer.Option(
            "--max-body",
            parser=size("--max-body"),
            metavar="SIZE",
            help="largest body of a request",
            show_default="8M",
        ),
    ] = ServeSettings.max_body
    max_waiting: Annotated[
        int, count("--max-waiting", "most requests that wait; more are refused")
    ] = ServeSettings.max_waiting
    header_timeout: Annotated[
        float, duration("--header-timeout", "longest time for a request's headers")
    ] = ServeSettings.header_timeout_s
    body_timeout: Annotated[
        float, duration("--body-timeout", "longest time for a request's body")
    ] = ServeSettings.body_timeout_s
    drain_timeout: Annotated[
        float, duration("--drain-timeout", "time for open requests after SIGTERM")
    ] = ServeSettings.drain_timeout_s
    log_level: Annotated[
        str, choice_option("--log-level", LOG_LEVELS, "least level that is logged")
    ] = "info"
    log_json: Annotated[bool, typer.Option("--log-json", help="log one JSON object a line")] = False

    def settings(self, model: str) -> ServeSettings:
        """The server's settings. Raises UsageError."""
        return ServeSettings(
            host=self.host,
            port=self.port,
            model_name=self.served_model_name or served_name(model),
            tool_parser=self.tool_parser,
            api_keys=self.keys(),
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            cors_origins=tuple(checked_origin(origin) for origin in self.cors_origin),
            allowed_hosts=tuple(checked_host(name) for name in self.allowed_host),
            max_body=self.max_body,
            max_waiting=self.max_waiting,
            header_timeout_s=self.header_timeout,
            body_timeout_s=self.body_timeout,
            drain_timeout_s=self.drain_timeout,
        )

    def keys(self) -> tuple[str, ...]:
        """Keys of flags, file and environment. Raises UsageError."""
        found = [*self.api_key, *api_keys_environment()]
        if self.api_key_file is not None:
            lines = file_lines(self.api_key_file)
            if not lines:
                raise UsageError(
                    f"--api-key-file {str(self.api_key_file)!r} has no key; expected one on a line"
                )
            found += lines
        for key in found:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise UsageError(
                    "an API key is empty or has spaces or letters that a header cannot carry; "
                    "expected printable ASCII such as the output of: openssl rand -hex 24"
                )
        return tuple(dict.fromkeys(found))


def serve(
    options: ServeOptions,
    run: RunOptions,
    argument: ModelArgument = None,
    model: ModelOption = None,
) -> int:
    """Serve a model over HTTP, as OpenAI's API does."""
    status = session.follow()
    if status is not None:
        return status
    name = session.chosen_model(argument, model, DEFAULT_MODEL)
    settings = options.settings(name)
    require_packages()
    from layline.serve import logs, server
    from layline.serve.page.description import describe

    logs.configure(options.log_level, as_json=options.log_json)
    # Before the model: a port that is taken must not cost the time to load.
    with server.bind(settings.host, settings.port) as sock:
        settings = replace(settings, address=str(sock.getsockname()[0]))
        planned, staged = announce(name, run, settings)
        begin = perf_counter()
        with session.open_llm(name, run) as llm:
            logs.tell_loaded(llm, perf_counter() - begin)
            server.listen(sock, settings.host, settings.port)
            about = describe(planned, llm.engine_config, staged)
            return serve_on(sock, llm, settings, about)


def serve_on(sock: socket.socket, llm: LLM, settings: ServeSettings, about: dict[str, Any]) -> int:
    """Serve a loaded model on a listening socket; the exit status.

    ``about`` is what the status page says of it.
    """
    from layline.engine.async_engine import AsyncEngine
    from layline.serve import server
    from layline.serve.app import build_app
    from layline.serve.service import Service
    from layline.serve.summary import usable_kv_bytes

    def ready() -> None:
        write_line(f"serving {settings.model_name} at {server.url_of(sock)}")

    running = llm.engine_config.max_running * llm.engine_config.attn_dp
    serving: server.Serving | None = None
    engine = AsyncEngine(
        llm,
        max_open=running + settings.max_waiting,
        on_failure=lambda error: serving.engine_failed(error) if serving else None,
    )
    service = Service(
        engine=engine,
        tokenizer=llm.tokenizer,
        max_model_len=llm.max_model_len,
        settings=settings,
        about=about,
        kv_bytes=usable_kv_bytes(llm),
        pooling=llm.facts.pooling,
        hidden_size=llm.facts.config.hidden_size,
    )
    serving = server.Serving(build_app(service), settings, ready)
    try:
        status = serving.run(engine, sock)
    finally:
        engine.close()
    llm.close(status)
    return status


def announce(
    model: str, run: RunOptions, settings: ServeSettings
) -> tuple[ModelPlan, PipelinePlan | None]:
    """Log what will run and whether it fits, before anything is loaded.

    Returns the plan, and that of several pipeline stages.
    """
    import logging

    from layline.serve.summary import effective, plan_lines, safety_lines

    log = logging.getLogger("layline.serve")
    keywords = run.keywords()
    engine = EngineConfig(**{**keywords, "model": model})
    try:
        planned, staged = open_plans(engine, keywords)
    except UsageError as error:
        raise type(error)(session.with_flags(str(error))) from None
    for level, line in plan_lines(planned, engine, staged):
        log.log(logging.getLevelName(level), line)
    shown = effective(planned, engine, settings, staged)
    log.info(
        "configuration: %s",
        " ".join(f"{name}={value}" for name, value in shown.items()),
        extra={"fields": {"configuration": shown}},
    )
    for line in safety_lines(settings):
        log.warning(line)
    return planned, staged


def open_plans(
    engine: EngineConfig, keywords: Mapping[str, Any]
) -> tuple[ModelPlan, PipelinePlan | None]:
    """The model's plan, and that of its pipeline. Raises UsageError for what cannot run."""
    from layline.engine.launch import refuse_beside_stages
    from layline.engine.pipeline_plan import plan_pipeline
    from layline.engine.planned import open_plan
    from layline.pipeline.doors import Doors, PipelineFlags

    planned = open_plan(engine.model, keywords, "ordinary")
    # Doors are warned of when the model is loaded.
    quiet = lambda message: None
    staged = plan_pipeline(planned, engine, door_environment(), quiet)
    if staged is not None:
        doors = Doors(door_environment(), PipelineFlags.of(engine), quiet)
        refuse_beside_stages(engine, staged.placement.num_stages, doors)
    return planned, staged


def checked_host(name: str) -> str:
    """A name as a Host header has it, without a port. Raises UsageError."""
    found = name if name == ANY else host_of(name)
    if found is None or (found != ANY and name.strip("[]").removesuffix(".").lower() != found):
        raise UsageError(
            f"--allowed-host {shorten(name)} is no name of a host; expected one without scheme and "
            "port, such as models.example.org, or '*' for any"
        )
    return found


def checked_origin(origin: str) -> str:
    """An origin as a browser sends it. Raises UsageError."""
    scheme, separator, authority = origin.rstrip("/").lower().partition("://")
    if origin != ANY and not (separator and scheme and host_of(authority)):
        raise UsageError(
            f"--cors-origin {shorten(origin)} is no origin; expected scheme, name and port, such "
            "as https://app.example.org or http://localhost:3000, or '*' for any"
        )
    return origin if origin == ANY else f"{scheme}://{authority}"


def served_name(model: str) -> str:
    """What requests call a model that was given no other name."""
    path = Path(model.removeprefix("config:"))
    if not path.exists():
        return model
    resolved = path.resolve()
    return resolved.stem if resolved.suffix == ".gguf" else resolved.name


def file_lines(path: Path) -> list[str]:
    """Lines that are no comment. Raises UsageError when the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UsageError(
            f"--api-key-file {str(path)!r} cannot be read: {reason}; expected a text file"
        ) from None
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def require_packages() -> None:
    """Raise UsageError when what serves is not installed."""
    from importlib.util import find_spec

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"layline serve needs {', '.join(missing)}, which is not installed; "
            "expected: pip install 'layline[serve]'"
        )
