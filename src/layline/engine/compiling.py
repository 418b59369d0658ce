"""Compiling grammars beside the event loop. No torch here."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable

from layline.errors import SamplingError
from layline.grammar import Grammar
from layline.text.constraint import Constraint

COMPILE_S = 10.0
"""Longest time that a request waits for its grammar."""
_AT_ONCE = 2


class CompileThreads:
    """Compiles in threads of its own, two at a time, that no end of a process waits for."""

    def __init__(self, compile_one: Callable[[Grammar], Constraint]) -> None:
        self._compile = compile_one
        self._free = threading.Semaphore(_AT_ONCE)

    async def compile(self, grammars: Iterable[Grammar]) -> dict[Grammar, Constraint]:
        """Each grammar compiled once; the loop goes on.

        Raises SamplingError for one that cannot be followed or takes too long.
        """
        found: dict[Grammar, Constraint] = {}
        for grammar in set(grammars):
            try:
                async with asyncio.timeout(COMPILE_S):
                    found[grammar] = await self._begin(grammar)
            except TimeoutError:
                raise SamplingError(
                    f"grammar was not compiled within {COMPILE_S:g} s; expected a simpler one"
                ) from None
        return found

    def _begin(self, grammar: Grammar) -> asyncio.Future[Constraint]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Constraint] = loop.create_future()

        def settle(outcome: Constraint | Exception) -> None:
            if done.done():
                return
            if isinstance(outcome, Exception):
                done.set_exception(outcome)
            else:
                done.set_result(outcome)

        def work() -> None:
            with self._free:
                outcome: Constraint | Exception
                try:
                    # Nobody waits any more for one that was given up before its turn.
                    outcome = TimeoutError() if done.done() else self._compile(grammar)
                except Exception as error:
                    outcome = error
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, outcome)

        threading.Thread(target=work, name="layline-compile", daemon=True).start()
        return done
