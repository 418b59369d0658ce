"""The engine's configuration: what flags and keywords say, resolved and checked.

Flags arrive here as keyword arguments with underscores. Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from layline.cores import usable_cores
from layline.errors import UsageError, one_of
from layline.topology import Topology

DEFAULT_MODEL = "smollm2-135m"
DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DP_PADDINGS = ("max-len", "sum-len")
KV_DTYPES = ("auto", "float32", "bfloat16", "fp8", "int8")
SPECULATIVE = ("off", "ngram", "draft")
MAX_SPECULATIVE_TOKENS = 64
CP_LAYOUTS = ("contiguous", "zigzag")
MAX_DEGREE = 1024
BATCH_INVARIANT_TP = 2
"""Most ranks whose sums have one order only: that of two numbers does not matter."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
CPU_KERNELS = ("auto", "torch")
MAX_THREADS = 1024
LOOPBACK = "127.0.0.1"
MAX_SIZE = 1 << 60
AUTO_SPLITS = "auto"
MAX_LAYERS = 1 << 16
MAX_ORDINAL = 1 << 16


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine runs.

    ``kv_memory`` is in bytes; None lets the engine size the cache for ``max_running`` requests of
    ``max_model_len`` tokens within a cap. ``max_model_len`` None means the model's own context.
    ``kv_dtype`` is the type of cached keys and values, ``auto`` that of the run; ``fp8`` (e4m3) and
    ``int8`` have a scale for each token and head. ``prefix_cache`` lets requests share the cached
    beginnings of their prompts. ``prefill_tokens`` bounds the tokens of one step: decodes come
    first, and prompts get what is left, at least one token. ``overlap`` has a step planned and
    launched while the one before it runs; None does so where another device or process runs it.
    ``threads`` are those of the whole run, ``kv_memory`` is that of one rank; ``max_running`` and
    ``prefill_tokens`` count on each attention DP rank.

    ``batch_invariant`` gives a request the same logits, to the bit, whatever runs beside it; see
    docs/determinism.md.

    The degrees are those of :class:`Topology`. ``boundary_reduction`` is resolved when the model
    is known. ``cp_layout`` says how a prompt's new tokens are divided over attention CP ranks.

    ``pp_stages``, ``pp_splits`` (layer numbers, or ``auto``: by cost) and ``pp_devices`` (an
    ordinal for each stage) shadow the environment doors of the same name; None leaves it to them.
    ``pp_processes`` divides the stages over processes; a rank's process drives a run of stages.

    ``speculative`` says who proposes tokens ahead, at most ``speculative_tokens`` a step: nobody,
    the request's own text, or ``speculative_model``, a draft model with the same vocabulary, whose
    ``speculative_boundary_reduction`` is the model's where it is None.
    ``record_collectives`` keeps a record of every collective of each rank, for ``layline plan``.
    """

    model: str = DEFAULT_MODEL
    device: str = "cpu"
    dtype: str = "auto"
    threads: int | None = None
    max_model_len: int | None = None
    kv_memory: int | None = None
    kv_dtype: str = "auto"
    prefix_cache: bool = True
    overlap: bool | None = None
    batch_invariant: bool = False
    max_running: int = 16
    prefill_tokens: int = 2048
    seed: int = 0
    tp: int = 1
    attn_dp: int = 1
    attn_cp: int = 1
    ep: int = 1
    dense_tp: int | None = None
    pp_stages: int | None = None
    pp_splits: str | Sequence[int] | None = None
    pp_devices: str | Sequence[int] | None = None
    pp_processes: int = 1
    boundary_reduction: str = "auto"
    sequence_parallel: bool = False
    input_scattered: bool = False
    quantised_all_reduce: bool = False
    dp_padding: str = "max-len"
    cp_layout: str = "contiguous"
    speculative: str = "off"
    speculative_model: str | None = None
    speculative_tokens: int = 4
    speculative_boundary_reduction: str | None = None
    record_collectives: bool = False

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise UsageError(one_of("device", self.device, DEVICES))
        if self.dtype not in DTYPES:
            raise UsageError(one_of("dtype", self.dtype, DTYPES))
        if self.kv_dtype not in KV_DTYPES:
            raise UsageError(one_of("kv_dtype", self.kv_dtype, KV_DTYPES))
        for name in ("prefix_cache", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} {getattr(self, name)!r} must be True or False")
        if not isinstance(self.overlap, bool | None):
            raise UsageError(f"overlap {self.overlap!r} must be True, False or None")
        _require_positive("threads", self.threads, MAX_THREADS)
        _require_positive("max_model_len", self.max_model_len)
        if self.max_model_len == 1:
            raise UsageError("max_model_len 1 must be at least 2: a prompt token and its answer")
        _require_positive("kv_memory", self.kv_memory)
        _require_positive("max_running", self.max_running)
        _require_positive("prefill_tokens", self.prefill_tokens)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UsageError(f"seed {self.seed!r} must be an integer")
        cpu_kernels()
        self._check_speculation()
        self._check_mesh()

    @property
    def overlaps(self) -> bool:
        """Whether a step is planned and launched while the one before it runs."""
        if self.overlap is not None:
            return self.overlap
        if self.speculative != "off":
            return False  # Guessing needs the tokens.
        return self.device != "cpu" or not self.topology().is_single

    def topology(self) -> Topology:
        """The mesh as rank 0 sees it. Raises UsageError for degrees that do not fit together."""
        return Topology(
            tp=self.tp,
            attn_dp=self.attn_dp,
            attn_cp=self.attn_cp,
            ep=self.ep,
            pp=self.pp_processes,
            dense_tp=self.dense_tp,
        )

    def _check_speculation(self) -> None:
        if self.speculative not in SPECULATIVE:
            raise UsageError(one_of("speculative", self.speculative, SPECULATIVE))
        _require_positive("speculative_tokens", self.speculative_tokens, MAX_SPECULATIVE_TOKENS)
        if self.overlap and self.speculative != "off":
            raise UsageError(
                f"overlap does not go with speculative {self.speculative!r}, which guesses from "
                "known tokens; expected overlap off, or speculative off"
            )
        if self.speculative == "draft":
            if self.speculative_model is None:
                raise UsageError(
                    "speculative 'draft' needs a draft model; expected speculative_model to name "
                    "one with the same vocabulary, or speculative 'ngram' to do without"
                )
            return
        for name in ("speculative_model", "speculative_boundary_reduction"):
            if getattr(self, name) is not None:
                raise UsageError(
                    f"{name} {getattr(self, name)!r} is for a draft model; expected speculative "
                    f"'draft' with it, found {self.speculative!r}"
                )

    def _check_mesh(self) -> None:
        for name in ("tp", "attn_dp", "attn_cp", "ep", "dense_tp"):
            _require_positive(name, getattr(self, name), MAX_DEGREE)
        for name in ("sequence_parallel", "input_scattered", "quantised_all_reduce"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} {getattr(self, name)!r} must be True or False")
        if self.dp_padding not in DP_PADDINGS:
            raise UsageError(one_of("dp_padding", self.dp_padding, DP_PADDINGS))
        if self.cp_layout not in CP_LAYOUTS:
            raise UsageError(one_of("cp_layout", self.cp_layout, CP_LAYOUTS))
        self._check_pipeline()
        topology = self.topology()
        for name in ("sequence_parallel", "input_scattered"):
            if getattr(self, name):
                _require_plain_tp(name, topology)
        if self.batch_invariant:
            self._check_batch_invariant()

    def _check_batch_invariant(self) -> None:
        if self.device != "cpu":
            raise UsageError(
                f"batch_invariant does not go with device {self.device!r}; expected device cpu"
            )
        if self.tp > BATCH_INVARIANT_TP:
            raise UsageError(
                f"batch_invariant does not go with tp {self.tp}: what more than two ranks sum "
                f"up is added in an order that varies; expected tp {BATCH_INVARIANT_TP}"
            )
        for name in ("sequence_parallel", "input_scattered", "quantised_all_reduce"):
            if getattr(self, name):
                raise UsageError(
                    f"batch_invariant does not go with {name}, which computes prompts in "
                    f"another way than answers; expected {name} False"
                )

    def _check_pipeline(self) -> None:
        _require_positive("pp_stages", self.pp_stages, MAX_DEGREE)
        _require_positive("pp_processes", self.pp_processes, MAX_DEGREE)
        # The fields are kept as tuples: they arrive as text, as lists over a wire, or as given.
        splits = self.pp_splits
        if splits is not None and splits != AUTO_SPLITS:
            splits = parse_numbers(splits, "pp_splits", least=1, most=MAX_LAYERS)
            object.__setattr__(self, "pp_splits", splits)
        if self.pp_devices is not None:
            devices = parse_numbers(self.pp_devices, "pp_devices", least=0, most=MAX_ORDINAL)
            object.__setattr__(self, "pp_devices", devices)
        stages = self.pp_stages
        if isinstance(splits, tuple):
            if any(first >= second for first, second in pairwise(splits)):
                near = ",".join(map(str, sorted(set(splits))))
                raise UsageError(
                    f"pp_splits {shorten_list(splits)} must increase; the nearest is {near}"
                )
            if stages is not None and len(splits) != stages - 1:
                raise UsageError(
                    f"pp_splits {shorten_list(splits)} makes {len(splits) + 1} stages, but "
                    f"pp_stages is {stages}; expected {stages - 1} layer numbers, or auto"
                )
        devices_given = self.pp_devices
        if devices_given is not None and stages is not None and len(devices_given) != stages:
            raise UsageError(
                f"pp_devices {shorten_list(devices_given)} names {len(devices_given)} devices, but "
                f"pp_stages is {stages}; expected {stages}, one for each stage"
            )
        if stages is not None and self.pp_processes > stages:
            raise UsageError(
                f"pp_processes {self.pp_processes} is more than pp_stages {stages}; expected 1 to "
                f"{stages}"
            )


def parse_numbers(
    value: str | Sequence[int], name: str, *, least: int, most: int
) -> tuple[int, ...]:
    """Whole numbers from ``least`` to ``most``, from a sequence or from text with commas.

    Raises UsageError, naming ``name`` and the first part that is none.
    """
    parts: Sequence[object] = value.split(",") if isinstance(value, str) else value
    numbers = []
    for part in parts:
        text = str(part).strip()
        is_number = text.isascii() and text.isdigit() and not isinstance(part, bool)
        if not is_number or len(text) > len(str(most)) or not least <= int(text) <= most:
            raise UsageError(
                f"{name} {shorten(value)} has {shorten(part)}; expected whole numbers from {least} "
                f"to {most} separated by commas"
            )
        numbers.append(int(text))
    if not numbers:
        raise UsageError(f"{name} {value!r} is empty; expected whole numbers, such as {least}")
    return tuple(numbers)


def shorten_list(numbers: Sequence[object]) -> str:
    """Numbers separated by commas, cut to a length that fits a message."""
    return shorten(",".join(map(str, numbers))).strip("'\"")


def parse_size(value: int | str | None, name: str = "kv_memory") -> int | None:
    """Bytes from a number or from text such as ``512M`` or ``2GiB`` (powers of 1024)."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    size = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not 1 <= size < MAX_SIZE:
        raise UsageError(
            f"{name} {shorten(value)} is not a size; expected bytes or a form like 512M, 2G"
        )
    return int(size)


def shorten(value: object, most: int = 60) -> str:
    """``repr(value)``, cut to a length that fits a message."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def cpu_kernels() -> str:
    """LAYLINE_CPU_KERNELS: ``auto``, or ``torch`` to do without the native kernels.

    Raises UsageError for anything else.
    """
    asked = os.environ.get("LAYLINE_CPU_KERNELS") or "auto"
    if asked not in CPU_KERNELS:
        raise UsageError(one_of("LAYLINE_CPU_KERNELS", asked, CPU_KERNELS))
    return asked


def default_threads() -> int:
    """OMP_NUM_THREADS where it is a number, else the cores this process may run on."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and 0 < int(asked) <= MAX_THREADS else usable_cores()


def threads_of_rank(threads: int | None, local_ranks: int) -> int:
    """A rank's share of the run's threads on one machine; at least 1."""
    return max(1, (threads or default_threads()) // local_ranks)


def elastic_environment() -> tuple[int, int, int, int, str] | None:
    """Rank, world size, local rank and local world size that torchrun gave this process.

    The last is the address of rank 0's machine. None outside torchrun, and in a world of one
    process.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = [os.environ.get(name, "") for name in names]
    if "TORCHELASTIC_RUN_ID" not in os.environ or not all(map(str.isdecimal, values)):
        return None
    rank, size, local_rank, local_size = map(int, values)
    address = os.environ.get("MASTER_ADDR", LOOPBACK)
    return (rank, size, local_rank, local_size, address) if size > 1 else None


def agent_store_environment() -> tuple[str, int] | None:
    """Where torchrun itself keeps the store through which its processes meet, if it does."""
    port = os.environ.get("MASTER_PORT", "")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not port.isdecimal():
        return None
    return os.environ.get("MASTER_ADDR", LOOPBACK), int(port)


def door_environment() -> Mapping[str, str]:
    """The variables of this process as they are at each look: doors may change during a run."""
    return os.environ


def api_keys_environment() -> list[str]:
    """The keys in LAYLINE_API_KEYS, separated by commas."""
    keys = os.environ.get("LAYLINE_API_KEYS", "").split(",")
    return [key.strip() for key in keys if key.strip()]


def _require_positive(name: str, value: int | None, most: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} {value!r} must be a positive integer")
    if most is not None and value > most:
        raise UsageError(f"{name} {value} is too large; the most is {most}")


def _require_plain_tp(name: str, topology: Topology) -> None:
    """Rows are scattered over attention TP only where that is the whole TP group."""
    if topology.tp == 1:
        raise UsageError(f"{name} scatters rows over ranks, but tp 1 has one; expected tp >= 2")
    for degree in ("attn_dp", "attn_cp"):
        if getattr(topology, degree) > 1:
            raise UsageError(
                f"{name} does not go with {degree} {getattr(topology, degree)}; expected {degree} 1"
            )
    if topology.dense_tp == 1:
        raise UsageError(
            f"{name} does not go with dense_tp 1, where each rank computes whole rows; "
            f"expected dense_tp {topology.tp}"
        )
