"""Names of other machines, pages of other sites, and what every answer tells a browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.serving import NAME, client_on, service_on

COMPLETIONS = "/v1/completions"
BODY = {"model": NAME, "prompt": "w1", "max_tokens": 2}
PATHS = ["/", "/metrics", "/status.json", "/plan.json", "/page/main.js", "/health", "/v1/models"]
OURS = ["127.0.0.1", "127.0.0.1:8000", "LOCALHOST:8000", "localhost.", "[::1]:8000", "127.8.9.1"]
STRANGE = [
    *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"),
    *("10.0.0.1", "0.0.0.0", "[::]", "", "127.0.0.1:8000@evil.example", "a b", "localhost:x"),
]


def at(client: Any, host: str, path: str = "/v1/models") -> Any:
    return client.get(path, headers={"host": host})


def test_a_local_server_answers_to_its_own_machine_only(client: Any) -> None:
    for host in OURS:
        assert at(client, host).status_code == 200, host
    for host in STRANGE:
        refused = at(client, host)
        assert refused.status_code == 421, host
        assert refused.json()["error"]["code"] == "host_not_allowed"
        assert refused.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", PATHS)
def test_no_path_is_left_out(client: Any, path: str) -> None:
    assert at(client, "evil.example", path).status_code == 421
    assert client.post(path, headers={"host": "evil.example"}).status_code == 421


def test_hosts_that_were_named(llm: Any) -> None:
    with service_on(llm, allowed_hosts=("models.example",)) as named, client_on(named) as client:
        assert at(client, "Models.Example:8443").status_code == 200
        assert at(client, "127.0.0.1").status_code == 200
        assert at(client, "other.example").status_code == 421
    with service_on(llm, allowed_hosts=("*",)) as service, client_on(service) as client:
        assert at(client, "other.example").status_code == 200


def test_a_server_for_others_knows_its_names_only_when_told(llm: Any) -> None:
    with service_on(llm, host="0.0.0.0", allowed_hosts=()) as service, client_on(service) as client:
        assert at(client, "some.example").status_code == 200
    settings: dict[str, Any] = {"host": "0.0.0.0", "allowed_hosts": ("models.example",)}
    with service_on(llm, **settings) as service, client_on(service) as client:
        assert at(client, "models.example").status_code == 200
        assert at(client, "10.0.0.1:8000").status_code == 200
        assert at(client, "other.example").status_code == 421


def test_what_a_name_was_found_to_be_decides(llm: Any) -> None:
    settings = {"host": "this-machine", "address": "127.0.1.1"}
    with service_on(llm, **settings) as service, client_on(service) as client:
        assert at(client, "evil.example").status_code == 421


@pytest.fixture(scope="module")
def asked(llm: Any) -> Iterator[Any]:
    with (
        service_on(llm, cors_origins=("https://a.example",)) as service,
        client_on(service) as client,
    ):
        yield client


def posted(client: Any, origin: str, host: str = "127.0.0.1:8000") -> int:
    headers = {"origin": origin, "host": host}
    status: int = client.post(COMPLETIONS, json=BODY, headers=headers).status_code
    return status


def test_pages_of_other_sites_may_not_post(client: Any, asked: Any) -> None:
    assert client.post(COMPLETIONS, json=BODY).status_code == 200, "no browser"
    for origin in ("http://127.0.0.1:8000", "https://127.0.0.1:8000", "HTTP://127.0.0.1:8000"):
        assert posted(client, origin) == 200
    strangers = [
        *("https://evil.example", "null", "", "http://127.0.0.1:3000", "http://127.0.0.1"),
        *("http://localhost:8000", "127.0.0.1:8000", "file://127.0.0.1:8000"),
    ]
    for origin in strangers:
        assert posted(client, origin) == 403, origin
    refused = client.post(COMPLETIONS, json=BODY, headers={"origin": "https://evil.example"})
    assert refused.json()["error"]["code"] == "origin_not_allowed"
    assert posted(asked, "https://a.example") == 200
    assert posted(asked, "https://evil.example") == 403
    # What only reads is refused by the browser, which shows its page nothing of the answer.
    assert client.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 200


@pytest.mark.parametrize("path", [*PATHS, "/nothing"])
def test_every_answer_is_closed_to_frames_and_guesses(client: Any, path: str) -> None:
    for headers in (client.get(path).headers, at(client, "evil.example", path).headers):
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cache-control"] in ("no-store", "no-cache")
        assert headers["x-request-id"]


def test_a_stream_has_the_headers_too(client: Any) -> None:
    streamed = client.post(COMPLETIONS, json={**BODY, "stream": True})
    assert streamed.headers["x-content-type-options"] == "nosniff"
    assert streamed.headers["cache-control"] == "no-cache"
    assert len(streamed.headers.get_list("cache-control")) == 1


@pytest.mark.parametrize(
    "given", ["a\r\nb", "<script>", "x" * 129, "", "é", "a b", "a\x00b", "\x1b[31m"]
)
def test_a_request_id_that_could_do_harm_is_replaced(client: Any, given: str) -> None:
    found = client.get("/health", headers=[("x-request-id", given.encode("latin-1"))])
    assert found.headers["x-request-id"].startswith("req_")
    kept = client.get("/health", headers={"x-request-id": "client.7:a_B-9"})
    assert kept.headers["x-request-id"] == "client.7:a_B-9"
