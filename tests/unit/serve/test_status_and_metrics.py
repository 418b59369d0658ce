"""The status page, /metrics and the OpenAPI document."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from layline import LLM
from layline.engine.statistics import Histogram
from layline.serve.settings import ServeSettings
from support.serving import NAME, client_on, service_on

HOSTILE = "</script><script>alert(1)</script>\"'"


def test_the_page_loads_nothing_from_elsewhere(client: Any) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for directive in ("script-src", "style-src", "connect-src"):
        assert f"{directive} 'self'" in policy
    assert "base-uri 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    texts = [client.get(path).text for path in ("/", "/status.js", "/status.css")]
    assert not any(re.search(r"https?://|@import|url\(", text) for text in texts)
    # Scripts and styles within the page are what the policy forbids.
    assert not re.search(r"<script>|<style|\son\w+=|style=", texts[0])
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval", texts[1])


def test_no_text_of_others_becomes_html(service: Any) -> None:
    hostile = replace(service, settings=ServeSettings(model_name=HOSTILE))
    with client_on(hostile) as client:
        assert "alert" not in client.get("/").text
        found = client.get("/status.json")
        assert found.headers["content-type"] == "application/json"
        assert found.json()["model"] == HOSTILE


def test_status_tells_model_and_load(client: Any) -> None:
    found = client.get("/status.json").json()
    assert found["model"] == NAME
    assert found["about"] == {"architecture": "Llama"}
    assert found["can_chat"] is True
    assert found["kv_blocks"] > 0
    assert (found["running"], found["waiting"], found["kv_blocks_used"]) == (0, 0, 0)


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
    after = numbers(client)

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


def test_a_histogram_counts_a_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 5.0):
        histogram.observe(value)
    histogram.observe(2.0, times=2)
    assert histogram.cumulative() == [(1.0, 2), (2.0, 5), (float("inf"), 6)]
    assert histogram.total == 12.0


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
