"""Keys, rate limits and other sites."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from layline.serve.accounts import Accounts, Bucket, key_name, tenant_of
from layline.serve.page import FILES
from layline.serve.problems import ApiError
from layline.serve.settings import ServeSettings
from support.serving import NAME, client_on, service_on

COMPLETIONS = "/v1/completions"
BODY = {"model": NAME, "prompt": "w1", "max_tokens": 2}
PATHS = [
    *("/", "/metrics", "/status.json", "/plan.json", "/page/main.js", "/page/style.css"),
    *("/v1/models", "/openapi.json", "/nothing"),
]


@pytest.fixture(scope="module")
def locked(llm: Any) -> Iterator[Any]:
    with service_on(llm, api_keys=("first", "second")) as service, client_on(service) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", PATHS)
def test_every_path_but_health_needs_a_key(locked: Any, path: str) -> None:
    wrong = [bearer("third"), bearer(""), bearer("first second"), {"authorization": "first"}]
    for headers in ({}, *wrong):
        refused = locked.get(path, headers=headers)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"]
    assert locked.get(path, headers=bearer("second")).status_code in (200, 404)


def test_health_is_open_and_completions_are_not(locked: Any) -> None:
    assert locked.get("/health").json() == {"status": "ok"}
    assert locked.post(COMPLETIONS, json=BODY).status_code == 401
    assert locked.post(COMPLETIONS, json=BODY, headers=bearer("first")).status_code == 200


def test_a_browser_gives_the_key_as_a_password(locked: Any) -> None:
    for path in FILES:
        assert locked.get(path).headers["www-authenticate"].startswith("Basic ")
    # Scripts ask again and again, and must not bring the dialog up each time.
    assert locked.get("/status.json").headers["www-authenticate"] == "Bearer"
    assert locked.get("/", auth=("", "first")).status_code == 200
    assert locked.get("/", auth=("first", "")).status_code == 401
    assert locked.get("/", headers={"authorization": "Basic !"}).status_code == 401


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared = []
    real = hmac.compare_digest

    def counted(one: Any, other: Any) -> bool:
        compared.append(len(one))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    accounts = Accounts(ServeSettings(api_keys=("a", "b", "c")))
    assert accounts.of("Bearer a") is not None
    # Digests have one length, whatever the keys have.
    assert compared == [32, 32, 32]


def test_a_name_does_not_tell_its_key() -> None:
    assert key_name("first") != key_name("second")
    assert "first" not in key_name("first")
    assert "first" not in str(ServeSettings(api_keys=("first",)).shown())


def test_a_bucket_fills_evenly() -> None:
    now = 100.0
    bucket = Bucket(60, clock=lambda: now)
    bucket.take(60)
    assert bucket.wait_s(1) == pytest.approx(1.0)
    now += 0.5
    assert bucket.wait_s(1) == pytest.approx(0.5)
    now += 0.5
    assert bucket.wait_s(1) == 0.0
    bucket.take(31)  # what was not known before may exceed what is left
    assert bucket.wait_s(1) == pytest.approx(31.0)
    now += 1000
    bucket.take(60)
    assert bucket.wait_s(1) == pytest.approx(1.0), "no more than a minute's worth is kept"


def test_requests_of_a_key_are_limited(llm: Any) -> None:
    limits = {"api_keys": ("a", "b"), "requests_per_minute": 2}
    with service_on(llm, **limits) as service, client_on(service) as client:
        found = [client.post(COMPLETIONS, json=BODY, headers=bearer("a")) for _ in range(3)]
        assert [response.status_code for response in found] == [200, 200, 429]
        error = found[2].json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert 0 < int(found[2].headers["retry-after"]) <= 30
        assert client.post(COMPLETIONS, json=BODY, headers=bearer("b")).status_code == 200
        assert client.get("/v1/models", headers=bearer("a")).status_code == 200


def test_tokens_are_counted_when_they_are_known(llm: Any) -> None:
    with service_on(llm, tokens_per_minute=40) as service, client_on(service) as client:
        long = {**BODY, "max_tokens": 100, "ignore_eos": True}
        assert client.post(COMPLETIONS, json=long).status_code == 200
        refused = client.post(COMPLETIONS, json=BODY)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "tokens"
        assert int(refused.headers["retry-after"]) > 60


def test_an_account_counts_what_was_generated_before_an_abort() -> None:
    account = Accounts(ServeSettings(tokens_per_minute=10)).of("")
    assert account is not None
    account.spend_request()
    account.spend_tokens(10)
    with pytest.raises(ApiError) as refused:
        account.spend_request()
    assert refused.value.status == 429


def test_other_sites_may_ask_only_when_named(client: Any, llm: Any) -> None:
    site = {"origin": "https://a.example"}
    preflight = {**site, "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in client.get("/health", headers=site).headers
    assert client.options(COMPLETIONS, headers=preflight).status_code == 405
    settings: dict[str, Any] = {"cors_origins": ("https://a.example",), "api_keys": ("k",)}
    with service_on(llm, **settings) as service, client_on(service) as asked:
        allowed = asked.options(COMPLETIONS, headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = asked.options(COMPLETIONS, headers={**preflight, "origin": "https://b.example"})
        assert other.status_code == 400
        refused = asked.post(COMPLETIONS, json=BODY, headers=site)
        assert refused.status_code == 401, "a preflight lets nobody in"
        assert refused.headers["access-control-allow-origin"] == "https://a.example"


def cached(client: Any, prompt: list[int], key: str | None = None, **fields: Any) -> int:
    """How many tokens of the prompt were found in the cache, as the answer says."""
    headers = {} if key is None else bearer(key)
    body = {**BODY, "prompt": prompt, **fields}
    usage = client.post(COMPLETIONS, json=body, headers=headers).json()["usage"]
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


def test_a_key_finds_nothing_of_what_another_left_in_the_cache(locked: Any, client: Any) -> None:
    prompt = [11 * n % 190 + 3 for n in range(40)]
    assert cached(locked, prompt, "first") == 0
    assert cached(locked, prompt, "first") == 32, "its own it finds, or the test shows nothing"
    assert cached(locked, prompt, "second") == 0
    # Naming the other's tenant as a salt does not help: the own one stands before it.
    for salt in (tenant_of("first"), "first", key_name("first")):
        assert cached(locked, prompt, "second", cache_salt=salt) == 0
        assert cached(locked, prompt, "second", cache_salt=salt) == 32
    assert cached(locked, prompt, "first", cache_salt="s") == 0
    assert cached(locked, prompt, "second", cache_salt="s") == 0
    assert cached(locked, prompt, "second") == 32
    # Where there are no keys everybody shares.
    cached(client, prompt)
    assert cached(client, prompt) == 32


def test_a_tenant_does_not_tell_its_key() -> None:
    accounts = Accounts(ServeSettings(api_keys=("a" * 40, "b")))
    found = [accounts.of(f"Bearer {key}") for key in ("a" * 40, "b")]
    tenants = {account.tenant for account in found if account is not None}
    assert len(tenants) == 2
    # One length: a key and a salt cannot be taken for another key and another salt.
    assert {len(tenant) for tenant in tenants} == {64}
    assert not any("a" * 40 in tenant for tenant in tenants)
    nobody = Accounts(ServeSettings()).of("")
    assert nobody is not None
    assert nobody.tenant == ""
