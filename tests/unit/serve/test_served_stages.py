"""A server whose model runs over pipeline stages: what it says, answers, and fails with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from layline import LLM, SamplingParams
from layline.cli.options import RunOptions
from layline.cli.serve import announce
from layline.errors import UsageError
from layline.serve.settings import ServeSettings
from layline.serve.summary import pipeline_text, plan_lines
from support.pipelined import ended_streams
from support.pipelined import staged as staged_executor
from support.serving import (
    NAME,
    Server,
    client_on,
    plan_of,
    service_on,
    serving,
    staged_plan_of,
    wait_for,
)

FLAGS = ("--served-model-name", NAME, "--threads", "1", "--pp-stages", "3", "--max-running", "8")
HIDDEN, STEP = 48, 2048
SLOTS = 2 * 2 * STEP * HIDDEN * 4
"""Bytes of a cut's two slots: two FP32 tensors for the largest step."""
# A command line whose second stage fails once there is a file of this name.
FAILING = """
import sys
from pathlib import Path
from layline.cli.main import main
from layline.engine.stage_program import ModelStage
walk, trigger = ModelStage._run, Path(sys.argv.pop(1))
def failing(self, *given):
    if self._index == 1 and trigger.exists():
        raise RuntimeError("planted")
    return walk(self, *given)
ModelStage._run = failing
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def staged(checkpoint: tuple[Path, Any]) -> Iterator[LLM]:
    flags: dict[str, Any] = {"threads": 1, "max_model_len": 512, "pp_stages": 3}
    with ended_streams(), LLM(str(checkpoint[0]), **flags) as llm:
        yield llm


def body(number: int, **more: Any) -> dict[str, Any]:
    content = f"w{number} w{number * 2}"
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_completion_tokens": 12,
        **more,
    }


def texts(url: str) -> list[str]:
    """The answers to twelve clients at once."""

    def ask(number: int) -> str:
        found = httpx2.post(f"{url}/v1/chat/completions", json=body(number), timeout=60)
        text: str = found.json()["choices"][0]["message"]["content"]
        return text

    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(ask, range(12)))


def test_a_server_over_stages_answers_as_one_without(
    checkpoint: Any, tmp_path: Path, server: Server
) -> None:
    with serving(checkpoint[0], tmp_path, *FLAGS) as found:
        assert texts(found.url) == texts(server.url)
        numbers = found.metrics()
        for stage in range(3):
            assert numbers[f'layline_stage_seconds_count{{stage="{stage}"}}'] > 0
        log = found.log.read_text()
        assert "pipeline of 3 stages, layer 0, layer 1, layer 2" in log
        assert "memory of stage 2 on cpu:2, layer 2: weights" in log
        assert "pp_stages=3 pp_splits=(1, 2) pp_devices=(0, 1, 2)" in log
        assert found.stop() == 0


def test_a_stage_that_fails_is_told_to_every_client(checkpoint: Any, tmp_path: Path) -> None:
    trigger = tmp_path / "now"
    program = ("-c", FAILING, str(trigger))
    with serving(checkpoint[0], tmp_path, *FLAGS, program=program) as server:
        client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
        )
        begun: set[int] = set()

        def listen(number: int) -> str:
            stream = client.chat.completions.create(
                **body(number, max_completion_tokens=16000), stream=True
            )
            try:
                for _ in stream:
                    begun.add(number)
            except openai.APIError as error:
                return str(error)
            return "it ended"

        with ThreadPoolExecutor(5) as pool:
            answers = [pool.submit(listen, number) for number in range(5)]
            wait_for(lambda: len(begun) == 5)
            trigger.touch()
            found = {each.result(20) for each in answers}
        assert found == {"pipeline stage 1 failed: RuntimeError: planted"}
        health = httpx2.get(f"{server.url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed"})
        refused = httpx2.post(f"{server.url}/v1/chat/completions", json=body(1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
        assert server.process.wait(15) == 3
        log = server.log.read_text()
        assert "the engine failed: pipeline stage 1 failed: RuntimeError: planted" in log


def test_every_stage_is_timed(staged: LLM) -> None:
    with service_on(staged) as service, client_on(service) as client:
        assert client.post("/v1/chat/completions", json=body(3)).status_code == 200
        stages = client.get("/status.json").json()["stages"]
        assert sorted(stages) == ["0", "1", "2"]
        assert len({each["count"] for each in stages.values()}) == 1
        assert all(each["seconds"] > 0 for each in stages.values())
        text = client.get("/metrics").text
        for stage in range(3):
            count = stages[str(stage)]["count"]
            assert f'layline_stage_seconds_count{{stage="{stage}"}} {float(count)}' in text
            for part in ("busy", "bubble", "slot_wait"):
                assert f'layline_stage_{part}_seconds_total{{stage="{stage}"}} ' in text
        use = staged.engine.times.use
        assert all(seconds > 0 for seconds in use.busy.values())
        # Of one request the later stages wait for the first at each step.
        assert use.bubble[2] > use.busy[2] * 0.5
        assert use.slot_wait[2] > 0


def test_the_page_tells_stages_and_slots(staged: LLM) -> None:
    with service_on(staged) as service, client_on(service) as client:
        about = client.get("/plan.json").json()
    assert about["facts"]["pipeline"] == "3 stages, layer 0, layer 1, layer 2"
    assert about["facts"]["slots between stages"] == "3.0 MiB, for steps of 2,048 tokens"
    pipeline = about["pipeline"]
    assert [(each["first"], each["end"]) for each in pipeline] == [(0, 1), (1, 2), (2, 3)]
    assert [each["ranks"] for each in pipeline] == [[0]] * 3
    assert [each["device"] for each in pipeline] == ["cpu:0", "cpu:1", "cpu:2"]
    assert [each["slots_bytes"] for each in pipeline] == [0, SLOTS, SLOTS]
    memory = about["memory"]
    assert memory["slots_bytes"] == 2 * SLOTS
    assert memory["weights_bytes"] == sum(each["weights_bytes"] for each in pipeline)
    json.dumps(about)


def test_slots_are_made_as_they_are_planned(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of two of the largest steps, so that slots have grown to all they can be."""
    monkeypatch.setenv("LAYLINE_PRIME_PIPE", "0")
    flags: dict[str, Any] = {"threads": 1, "max_model_len": 2 * STEP + 8, "pp_stages": 3}
    with LLM(str(checkpoint[0]), **flags) as llm:
        prompt = [number % 150 + 3 for number in range(2 * STEP)]
        llm.generate([prompt], SamplingParams(max_tokens=2))
        cuts = staged_executor(llm).loops.runtime.cuts
        assert {sum(cut.capacities) for cut in cuts} == {SLOTS}
        found = staged_plan_of(llm)
        assert found is not None
        assert [held.slots for held in found.memory.stages] == [0, SLOTS, SLOTS]


def test_what_is_said_of_memory(staged: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [*plan_lines(plan_of(staged), staged.engine_config, staged_plan_of(staged))]
    assert {level for level, _ in lines} == {"INFO"}
    said = [text for _, text in lines]
    assert "pipeline of 3 stages, layer 0, layer 1, layer 2" in said[1]
    for stage, slots in enumerate(("slots 0 MiB", "slots 1.5 MiB", "slots 1.5 MiB")):
        assert said[2 + stage].startswith(f"memory of stage {stage} on cpu:{stage}, layer {stage}:")
        assert slots in said[2 + stage]
    assert "memory of 3 stages: " in said[5]
    assert "slots between pipeline stages 3.0 MiB for steps of 2,048 tokens" in said[5]
    monkeypatch.setattr("layline.engine.room.cpu_bytes", lambda: 1 << 18)
    small = [*plan_lines(plan_of(staged), staged.engine_config, staged_plan_of(staged))]
    assert [level for level, _ in small] == ["INFO", "INFO", *["WARNING"] * 4]
    assert all("does not fit in the 0.1 MiB of its device" in text for _, text in small[2:5])
    assert "does not fit, one request of 512 tokens has no room" in small[5][1]


def test_a_pipeline_in_words() -> None:
    assert pipeline_text((0, 3)) == "pipeline of 1 stage, layers 0 to 2"
    assert pipeline_text((0, 2, 3)) == "pipeline of 2 stages, layers 0 to 1, layer 2"


def test_what_does_not_run_over_stages_is_refused_before_a_word(
    checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(checkpoint[0])
    run = RunOptions(pp_stages=2, speculative="draft", speculative_model=model)
    with pytest.raises(UsageError, match="speculative draft does not run with 2 pipeline stages"):
        announce(model, run, ServeSettings())
    assert not caplog.records
