"""The status page, /metrics and the OpenAPI document."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from layline import LLM
from layline.engine.statistics import Histogram
from layline.engine.step_times import PARTS, PassTimes, StepTimes
from layline.serve.page import FILES
from layline.serve.page.description import groups, pipeline
from layline.serve.settings import ServeSettings
from layline.topology import Topology
from support.serving import NAME, client_on, service_on, wait_for

HOSTILE = "</script><script>alert(1)</script>\"'"


def test_the_page_loads_nothing_from_elsewhere(client: Any) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for directive in ("script-src", "style-src", "connect-src", "img-src"):
        assert f"{directive} 'self'" in policy
    for directive in ("base-uri", "form-action", "frame-ancestors", "trusted-types"):
        assert f"{directive} 'none'" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    texts = {path: client.get(path).text for path in FILES}
    # A namespace of SVG is a name and nothing that is loaded.
    namespace = "http://www.w3.org/2000/svg"
    assert not any(
        re.search(r"https?://|@import|url\((?!#)", text.replace(namespace, ""))
        for text in texts.values()
    )
    # Scripts and styles within the page are what the policy forbids.
    assert not re.search(r"<script>|<style|\son\w+=|style=", texts["/"])
    for path, text in texts.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval", text), path


def test_no_text_of_others_becomes_html(service: Any) -> None:
    hostile = replace(service, settings=ServeSettings(model_name=HOSTILE))
    with client_on(hostile) as client:
        assert "alert" not in client.get("/").text
        found = client.get("/plan.json")
        assert found.headers["content-type"] == "application/json"
        assert found.json()["model"] == HOSTILE
        # As a label it is one value, whatever it holds.
        (labels,) = [labels for name, labels in numbers(client) if name == "layline_model_info"]
        assert dict(labels)["model"] == HOSTILE


def test_status_tells_the_load(client: Any) -> None:
    found = client.get("/status.json").json()
    assert found["kv_blocks"] > 0
    assert (found["running"], found["waiting"], found["kv_blocks_used"]) == (0, 0, 0)
    assert found["failure"] is None
    assert found["stopping"] is False
    assert set(found["parts"]) == set(PARTS)


def test_the_plan_tells_model_and_mesh(client: Any) -> None:
    found = client.get("/plan.json").json()
    assert found["model"] == NAME
    assert found["can_chat"] is True
    assert found["facts"]["architecture"] == "LlamaForCausalLM"
    assert found["facts"]["weights"] == "safetensors: 23 F32"
    (rank,) = found["mesh"]["ranks"]
    assert rank == {"rank": 0, "stage": 0, "attn_dp": 0, "attn_cp": 0, "attn_tp": 0}
    assert found["mesh"]["groups"] == []
    assert found["pipeline"] == [{"first": 0, "end": 3, "ranks": [0]}]
    names = [line["name"] for line in found["lines"]]
    assert names == ["embed -> attn", "attn -> ffn", "ffn -> attn", "ffn -> norm"]


def test_pipeline_stages_have_the_ranks_that_run_them() -> None:
    two = Topology(tp=2, pp=2)
    assert [stage["ranks"] for stage in pipeline(two, (0, 3, 6))] == [[0, 1], [2, 3]]
    # Two stages each for the two ranks of a pipeline.
    ranks = [stage["ranks"] for stage in pipeline(two, (0, 1, 2, 3, 6))]
    assert ranks == [[0, 1], [0, 1], [2, 3], [2, 3]]
    ranks = [stage["ranks"] for stage in pipeline(two, (0, 1, 2, 6))]
    assert ranks == [[0, 1], [2, 3], [2, 3]], "as placement.place divides them"
    assert {group["name"]: group["groups"] for group in groups(two)} == {
        "TP": [(0, 1), (2, 3)],
        "attention TP": [(0, 1), (2, 3)],
        "pipeline": [(0, 2), (1, 3)],
    }


def numbers(client: Any) -> dict[Any, float]:
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_metrics_count_what_was_done(client: Any) -> None:
    before = numbers(client)
    body = {"model": NAME, "prompt": [5, 6, 7], "max_tokens": 4, "n": 2, "ignore_eos": True}
    assert client.post("/v1/completions", json=body).status_code == 200
    # The engine hands the last token out before it counts the step's parts.
    delivered = ("layline_step_part_seconds_count", (("part", "deliver"),))
    steps = ("layline_steps_total", ())

    def counted() -> dict[Any, float] | None:
        found = numbers(client)
        more = {name: found[name] - before[name] for name in (delivered, steps)}
        return found if more[delivered] == more[steps] else None

    after = wait_for(counted)

    def gained(name: str, **labels: str) -> float:
        key = (f"layline_{name}", tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0.0)

    assert gained("prompt_tokens_total") == 6
    assert gained("generated_tokens_total") == 8
    assert gained("requests_finished_total", reason="length") == 2
    assert gained("time_to_first_token_seconds_count") == 2
    assert gained("inter_token_seconds_count") == 6
    assert gained("request_seconds_count") == 2
    assert gained("step_seconds_count") == gained("steps_total") > 0
    for part in ("schedule", "prepare", "execute", "sample", "deliver"):
        assert gained("step_part_seconds_count", part=part) == gained("steps_total"), part
        assert gained("step_part_seconds_sum", part=part) > 0, part
    assert gained("step_part_seconds_count", part="wire") == 0, "there is one process"
    assert gained("stage_seconds_count", stage="0") == gained("steps_total")
    # Parts are parts: together they take no longer than their steps and the handing out.
    whole = gained("step_seconds_sum") + gained("step_part_seconds_sum", part="deliver")
    parts = ("schedule", "prepare", "execute", "sample", "deliver")
    assert sum(gained("step_part_seconds_sum", part=part) for part in parts) <= whole
    path = {"method": "POST", "path": "/v1/completions"}
    assert gained("http_requests_total", status="200", **path) == 1
    client.get("/some/other/path")
    assert ("layline_http_requests_total", (
        ("method", "GET"), ("path", "other"), ("status", "404"),
    )) in numbers(client)  # fmt: skip


def test_metrics_count_drafts(checkpoint: Any) -> None:
    llm = LLM(str(checkpoint[0]), threads=1, max_model_len=512, speculative="ngram")
    with service_on(llm) as service, client_on(service) as client:
        prompt = [21, 22, 23, 24, 25] * 6
        body = {"model": NAME, "prompt": prompt, "max_tokens": 60, "temperature": 0}
        assert client.post("/v1/completions", json=body).status_code == 200
        found = numbers(client)
    drafted = found["layline_draft_tokens_total", ()]
    assert drafted >= found["layline_accepted_draft_tokens_total", ()] > 0
    assert drafted == llm.stats().drafted
    assert found["layline_generated_tokens_total", ()] == 60
    assert found["layline_steps_total", ()] < 60


def test_metrics_say_what_serves_and_how_much_it_holds(client: Any, service: Any) -> None:
    found = numbers(client)
    (build,) = [dict(labels) for name, labels in found if name == "layline_build_info"]
    assert set(build) == {"version", "python", "torch"}
    assert all(build.values())
    (model,) = [dict(labels) for name, labels in found if name == "layline_model_info"]
    assert model["model"] == NAME
    assert model["architecture"] == "LlamaForCausalLM"
    assert model["mesh"] == "tp 1"
    blocks, held = found["layline_kv_blocks", ()], found["layline_kv_bytes", ()]
    # 3 layers, keys and values, 2 heads of 8 FP32 values, for 16 tokens.
    assert held == blocks * 3 * 2 * 2 * 8 * 4 * 16
    idle = found["layline_kv_blocks_idle", ()]
    assert found["layline_kv_idle_bytes", ()] == idle * held / blocks
    assert found["layline_kv_used_bytes", ()] == 0
    for reason in ("stop", "length", "abort", "error"):
        assert ("layline_requests_finished_total", (("reason", reason),)) in found


def test_every_name_has_the_prefix_and_few_values(client: Any) -> None:
    for path in ("/a", "/b", "/v1/models/x", "/v1/models/y"):
        client.get(path)
        client.request("BREW", path)
    counts = Counter()
    for family in text_string_to_metric_families(client.get("/metrics").text):
        assert family.name.startswith("layline_")
        assert family.documentation.endswith(".")
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
        counts.update(sample.name for sample in family.samples)
    # Every histogram has at most one row a bound and label; paths are the server's own or "other".
    assert max(counts.values()) < 200
    assert not [labels for name, labels in numbers(client) if "/a" in dict(labels).values()]


def test_a_histogram_counts_a_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 5.0):
        histogram.observe(value)
    histogram.observe(2.0, times=2)
    assert histogram.cumulative() == [(1.0, 2), (2.0, 5), (float("inf"), 6)]
    assert histogram.total == 12.0


def test_of_several_ranks_the_slowest_counts() -> None:
    times = StepTimes()
    times.add("schedule", 0.25)
    times.add("schedule", 0.25)
    slow = PassTimes(prepare=1.0, execute=4.0, sample=1.0, stages=[(0, 2.0), (1, 1.0)])
    times.add_passes([PassTimes(execute=5.0, stages=[(0, 3.0)]), slow], waited=7.5)
    times.add_passes([])
    times.end_step()
    totals = {name: (sum(part.counts), part.total) for name, part in times.parts.items()}
    assert totals == {
        "draft": (0, 0.0),
        "schedule": (1, 0.5),
        "prepare": (1, 1.0),
        "execute": (1, 4.0),
        "sample": (1, 1.0),
        "wire": (1, 1.5),
        "deliver": (0, 0.0),
    }
    assert {stage: found.total for stage, found in times.stages.items()} == {0: 3.0, 1: 1.0}
    times.end_step()
    assert totals["schedule"] == (1, 0.5), "a step is counted once"


def test_the_document_names_every_path(client: Any) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    referred = re.findall(r"#/components/schemas/(\w+)", json.dumps(document))
    assert set(referred) <= set(schemas)
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert set(schemas["ChatRequest"]["required"]) == {"model", "messages"}
    for path in document["paths"]:
        shown = client.get(path.replace("{model}", NAME))
        assert shown.status_code in (200, 405), path
