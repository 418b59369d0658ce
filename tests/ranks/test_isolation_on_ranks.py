"""A request that fails on ranks in other processes ends alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layline import LLM, SamplingParams
from layline.errors import RequestError
from support.poisoned import POISON, save_poisoned

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
GOOD = [[5 + 7 * n % 60 for n in range(length)] for length in (37, 20, 3, 16)]
MESHES = [{"tp": 2}, {"tp": 2, "attn_dp": 2}, {"tp": 2, "attn_cp": 2}]


@pytest.mark.parametrize("mesh", MESHES, ids="-".join)
def test_rows_fail_alone(tmp_path: Path, mesh: dict[str, Any]) -> None:
    save_poisoned(tmp_path, max_position_embeddings=96)
    path = str(tmp_path)
    wanted = [output.token_ids for output in LLM(path, threads=1).generate(GOOD, GREEDY)]
    with LLM(path, threads=1, prefill_tokens=13, **mesh) as llm:
        for _ in range(2):
            with pytest.raises(RequestError, match=r"^prompt 1: .*NaN") as caught:
                llm.generate([GOOD[0], [9, POISON, 9], *GOOD[1:], [POISON] * 40], GREEDY)
            reasons = [output.finish_reason for output in caught.value.outputs]
            assert reasons == ["length", "error", *["length"] * 3, "error"]
            found = [o.token_ids for o in caught.value.outputs if o.finish_reason == "length"]
            assert found == wanted
            assert llm._engine.stats().blocks_held == 0
        assert [output.token_ids for output in llm.generate(GOOD, GREEDY)] == wanted
