"""One engine in its own process, driven by JSON lines: the measured side of ``bench latency``.

Run by path (``python -P worker.py ENGINE``), also by an interpreter that has no Layline, so this
file imports only the standard library at the top and nothing of Layline outside ``Layline``.

Requests and replies are one JSON object a line:
``{"op": "load", "model", "threads", "dtype", "device", "context", "batch"}`` -> ``{"version",
"vocab_size"}``;
``{"op": "generate", "prompts": [[int]], "new_tokens"}`` -> ``{"seconds", "tokens": [[int]],
"first_seconds"}``, the time until each prompt has its first token, or null where that is not known;
``{"op": "memory"}`` -> ``{"peak_bytes"}``. A failure is ``{"error": text}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Layline:
    """This package, through its public interface."""

    def load(self, request: dict[str, Any]) -> str:
        """Open the model with room for the whole batch."""
        from layline import LLM, SamplingParams, __version__

        self.params = SamplingParams
        self.llm = LLM(
            model=request["model"],
            device=request["device"],
            dtype=request["dtype"],
            threads=request["threads"],
            max_model_len=request["context"],
            max_running=request["batch"],
            **request.get("mesh", {}),
        )
        self.vocab_size = self.llm.tokenizer.vocab_size
        return __version__

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy, exactly ``new_tokens`` each."""
        params = self.params(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        return [list(output.token_ids) for output in self.llm.generate(prompts, params)]

    def worker_peaks(self) -> list[int]:
        """Peak memory of each rank's process, where there are any."""
        return list(self.llm.worker_peaks())


class Transformers:
    """transformers' ``generate``; GGUF files are dequantised into the dtype."""

    def load(self, request: dict[str, Any]) -> str:
        """Load with the same number of threads; ``auto`` is bfloat16, its fastest on a CPU."""
        import torch
        import transformers
        from transformers.utils import logging

        if request["threads"]:
            torch.set_num_threads(request["threads"])
        quiet: Any = logging
        quiet.set_verbosity_error()
        quiet.disable_progress_bar()
        dtype = "bfloat16" if request["dtype"] == "auto" else request["dtype"]
        path = Path(request["model"])
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
        if path.is_file():
            where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            **where, dtype=getattr(torch, dtype)
        )
        self.model = loaded.to(request["device"]).eval()
        self.torch = torch
        self.vocab_size = self.model.config.vocab_size
        return str(transformers.__version__)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy, exactly ``new_tokens`` each; the prompts have one length, so no padding."""
        ids = self.torch.tensor(prompts, device=self.model.device)
        with self.torch.inference_mode():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
        tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return tokens


class LlamaCpp:
    """llama.cpp through the low-level calls of ``llama_cpp``, which can decode a batch."""

    def load(self, request: dict[str, Any]) -> str:
        """One context with a sequence for every prompt of the largest batch."""
        import llama_cpp

        self.api: Any = llama_cpp
        # The library logs to stderr through a callback; an empty one silences it.
        self.silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.silent, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            request["model"].encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise ValueError(f"llama.cpp cannot read {request['model']!r}; expected a .gguf file")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = request["context"] * request["batch"]
        params.n_batch = params.n_ubatch = request["context"]
        params.n_seq_max = request["batch"]
        threads = request["threads"] or os.cpu_count() or 1
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp could not make a context of the asked size")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.batch = llama_cpp.llama_batch_init(max(request["context"], request["batch"]), 0, 1)
        return str(llama_cpp.__version__)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy: each prompt in one call, then one call a step for all of them."""
        api = self.api
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        tokens: list[list[int]] = [[] for _ in prompts]
        for sequence, prompt in enumerate(prompts):
            last = len(prompt) - 1
            self.decode([(t, i, sequence, i == last) for i, t in enumerate(prompt)])
            tokens[sequence].append(self.argmax(last))
        self.first_at = time.perf_counter()
        for step in range(new_tokens - 1):
            rows = [
                (tokens[sequence][-1], len(prompt) + step, sequence, True)
                for sequence, prompt in enumerate(prompts)
            ]
            self.decode(rows)
            for sequence in range(len(prompts)):
                tokens[sequence].append(self.argmax(sequence))
        return tokens

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Run (token, position, sequence, wants logits) rows. Raises RuntimeError on failure."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = wanted
        status = self.api.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def argmax(self, row: int) -> int:
        """The likeliest token of a row of the last call."""
        import numpy

        logits = self.api.llama_get_logits_ith(self.context, row)
        return int(numpy.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


ENGINES: dict[str, type[Any]] = {
    "layline": Layline,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
}


def peak_bytes() -> int:
    """VmHWM of this process; 0 where /proc does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM:")), 0)


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out one request."""
    if request["op"] == "load":
        return {"version": engine.load(request), "vocab_size": engine.vocab_size}
    if request["op"] == "memory":
        # Engines that run in this process alone have no other peaks.
        others: list[int] = getattr(engine, "worker_peaks", list)()
        return {"peak_bytes": peak_bytes() + sum(others)}
    start = time.perf_counter()
    tokens = engine.generate(request["prompts"], request["new_tokens"])
    seconds = time.perf_counter() - start
    first_at = getattr(engine, "first_at", None)
    first_seconds = None if first_at is None else first_at - start
    return {"seconds": seconds, "first_seconds": first_seconds, "tokens": tokens}


def serve(name: str) -> None:
    """Answer requests from stdin until it ends."""
    engine = ENGINES[name]()
    # Libraries print to stdout as they like; replies get a descriptor of their own.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        for line in sys.stdin:
            try:
                reply = answer(engine, json.loads(line))
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
