"""The status page in headless Chromium."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from layline import LLM
from layline.serve.app import build_app
from layline.serve.page import FILES
from layline.serve.page.description import describe
from layline.serve.service import Service
from layline.serve.settings import ServeSettings
from support.browser import Page, chromium, listening, missing_browser
from support.serving import NAME, plan_of, save_talker, service_on, staged_plan_of

MISSING = missing_browser()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
HOSTILE = (
    "<img src=x onerror=\"hit('img')\">",
    "</script><script>hit('script')</script>",
    "<svg onload=hit('svg')></svg>",
    "<a href=\"javascript:hit('link')\">javascript:hit('text')</a>",
    "</textarea></p></div><iframe srcdoc=\"<script>parent.hit('frame')</script>\"></iframe>",
    "{{constructor.constructor('hit()')()}}${hit('template')}\" onfocus=hit('quote') autofocus='",
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, Any]) -> LLM:
    """A model whose answers take some seconds and never end: a person watches this page."""
    found = LLM(str(checkpoint[0]), threads=1, max_model_len=4096)
    executor: Any = found._executor
    collect = executor.collect

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.005)
        result = collect(*arguments)
        # Sampling finds the end of a sequence sooner or later.
        tokens = [
            [(3 if one == 2 else one, logprobs) for one, logprobs in part] for part in result.tokens
        ]
        return replace(result, tokens=tokens)

    executor.collect = slowly
    return found


@pytest.fixture(scope="module")
def service(llm: LLM) -> Iterator[Service]:
    with service_on(llm) as found:
        yield found


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with listening(build_app(service)) as found:
        yield found


def say(page: Page, text: str) -> None:
    """Type a message and send it with the keyboard."""
    from selenium.webdriver.common.keys import Keys

    page.wait(lambda: page.find("text").is_displayed())
    page.find("text").send_keys(text, Keys.ENTER)


def test_it_loads_without_an_error_and_from_here_only(driver: Any, url: str) -> None:
    page = Page(driver, url).ready()
    page.wait(lambda: page.text("rate").replace(".", "").isdecimal())
    asked = page.requested()
    assert {urlsplit(each).path for each in asked} >= {*FILES, "/status.json", "/plan.json"}
    here = urlsplit(url).netloc
    assert {urlsplit(each).netloc for each in asked} == {here}
    assert page.harm() == []
    assert page.text("model") == NAME
    assert page.text("state") == "ready"
    assert "LlamaForCausalLM" in page.text("about")
    assert "safetensors: 23 F32" in page.text("about")


def test_the_numbers_follow_a_request(driver: Any, url: str, service: Service) -> None:
    page = Page(driver, url).ready()
    assert page.text("running") == "0"
    say(page, "w2 w6")
    page.wait(lambda: page.text("running") == "1")
    page.wait(lambda: float(page.text("rate")) > 0)
    first = page.text("rate-note")
    page.wait(lambda: page.text("rate-note") != first)
    page.wait(lambda: "execute" in page.text("parts-legend"))
    assert page.text("step").endswith(("s", "ms", "µs"))
    assert page.wait(lambda: page.text("stage-time-0")).endswith(("s", "ms", "µs"))
    page.wait(lambda: page.count("#rate-line polyline") == 1)
    page.wait(lambda: not page.text("kv-note").startswith("0 of"))
    page.find("stop").click()
    page.wait(lambda: page.text("running") == "0")
    assert page.text("running") == str(service.engine.load.running)
    assert page.harm() == []


def test_the_chat_streams_stops_and_goes_on(driver: Any, url: str) -> None:
    from selenium.webdriver.common.keys import Keys

    page = Page(driver, url).ready()
    say(page, "w2 w6")
    answer = "return document.querySelector('#log .assistant p')?.textContent ?? ''"
    begun = page.wait(lambda: page.run(answer))
    page.wait(lambda: len(page.run(answer)) > len(begun))
    assert not page.find("send").is_enabled()
    assert page.find("stop").is_enabled()
    page.find("text").send_keys("not sent", Keys.ESCAPE)
    page.wait(lambda: page.count("#log .info") == 1)
    assert page.run(answer).startswith(begun)
    assert page.run("return document.activeElement.id") == "text"
    # Shift+Enter is a line; the message that was being written is still there.
    page.find("text").send_keys(Keys.SHIFT, Keys.ENTER, Keys.NULL, "w9", Keys.ENTER)
    page.wait(lambda: page.count("#log .user") == 2)
    last = "return [...document.querySelectorAll('#log .user p')].at(-1).textContent"
    assert page.run(last) == "not sent\nw9"
    page.find("stop").click()
    page.wait(lambda: page.find("clear").is_enabled())
    page.find("clear").click()
    assert page.text("log") == ""
    assert page.harm() == []


def test_an_error_is_told_and_the_message_kept(driver: Any, url: str) -> None:
    page = Page(driver, url).ready()
    page.run("document.getElementById('text').value = 'w1 '.repeat(5000)")
    say(page, "w2")
    page.wait(lambda: page.count("#log .error") == 1)
    assert "maximum context length is 4096" in page.text("log")
    assert page.find("text").get_property("value").endswith("w2")
    assert page.find("send").is_enabled()


def hostile_model(path: Path) -> LLM:
    """A model that writes nothing but hostile text, as much as its context has room for."""
    save_talker(path)
    file = path / "tokenizer.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    words = settings["model"]["vocab"]
    settings["model"]["vocab"] = {
        word if index < 3 else f"{HOSTILE[index % len(HOSTILE)]}<!--{index}-->": index
        for word, index in words.items()
    }
    file.write_text(json.dumps(settings), encoding="utf-8")
    llm = LLM(str(path), threads=1, max_model_len=128)
    # The page samples, so that an end of the answer could be drawn after a few words.
    llm.tokenizer.eos_ids = frozenset()
    return llm


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service_on(hostile_model(tmp_path_factory.mktemp("hostile"))) as service:
        settings = replace(service.settings, model_name="".join(HOSTILE))
        facts = {f"{text} {name}": text for text in HOSTILE for name in ("fact",)}
        yield replace(service, settings=settings, about={**service.about, "facts": facts})


def converse(driver: Any, url: str) -> Page:
    """A page that shows hostile text of every origin."""
    page = Page(driver, url)
    page.wait(lambda: page.text("model"))
    say(page, "".join(HOSTILE))
    page.wait(lambda: page.find("send").is_enabled() and page.text("log"))
    return page


def test_hostile_texts_are_shown_as_they_are(driver: Any, hostile: Service) -> None:
    with listening(build_app(hostile)) as url:
        page = converse(driver, url)
        page.wait(lambda: len(page.text("log")) > 2000)
        text = "".join(HOSTILE)
        assert page.text("model") == text
        assert page.run("return document.title") == f"{text} · Layline"
        assert page.run("return document.querySelector('#log .user p').textContent") == text
        for each in HOSTILE:
            assert each in page.run(
                "return document.querySelector('#log .assistant p').textContent"
            )
            assert each in page.text("about")
        assert page.harm() == []


class Careless:
    """The application with scripts that put texts into the page as HTML."""

    def __init__(self, app: Any, *, policy: bool) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def changed(message: Any) -> None:
            if message["type"] == "http.response.start":
                kept = {b"content-length"} if self._policy else {
                    b"content-length", b"content-security-policy"
                }  # fmt: skip
                pairs = [pair for pair in message["headers"] if pair[0].lower() not in kept]
                message["headers"] = pairs
            elif scope["path"].endswith(".js"):
                body = message["body"].replace(b"textContent", b"innerHTML")
                body = body.replace(b"body.append(text)", b"body.innerHTML += text")
                message["body"] = body
            await send(message)

        await self._app(scope, receive, changed)


def test_a_careless_page_is_noticed(driver: Any, hostile: Service) -> None:
    """The test above can fail: the same texts do harm where HTML is made of them."""
    with listening(Careless(build_app(hostile), policy=False)) as url:
        page = converse(driver, url)
        harm = page.wait(lambda: [each for each in page.harm() if each.startswith("ran img")])
        assert harm


def test_the_policy_alone_stops_a_careless_page(driver: Any, hostile: Service) -> None:
    with listening(Careless(build_app(hostile), policy=True)) as url:
        page = Page(driver, url)
        harm = page.wait(page.harm)
        assert not [each for each in harm if each.startswith("ran ")]
        assert any("TrustedHTML" in each for each in harm)


def test_with_keys_the_browser_asks_for_one(driver: Any, llm: LLM) -> None:
    with service_on(llm, api_keys=("right",)) as service, listening(build_app(service)) as url:
        for given in (url, url.replace("http://", "http://:wrong@")):
            page = Page(driver, given)
            assert page.count("#model") == 0, given
            assert any("401" in message for message in page.console()), given
        page = Page(driver, url.replace("http://", "http://:right@")).ready()
        say(page, "w2 w6")
        page.wait(lambda: page.run("return document.querySelector('#log .assistant p')"))
        # The browser keeps what was typed, as after its own dialog.
        page = Page(driver, url).ready()
        say(page, "w2 w6")
        page.wait(lambda: page.run("return document.querySelector('#log .assistant p')"))
        assert page.harm() == []


TITLES = """return [...document.querySelectorAll("#mesh title")]
    .map((each) => each.textContent)"""
LAYERS = """return [...document.querySelectorAll("#pipeline .place")]
    .map((each) => each.textContent)"""
WIDTHS = """return [...document.querySelectorAll("#pipeline rect")]
    .map((each) => Number(each.getAttribute("width")))"""


def mesh_service(service: Service, llm: LLM, **flags: Any) -> Service:
    about = describe(plan_of(llm, **flags), llm.engine_config, staged_plan_of(llm, **flags))
    return replace(service, about=about)


def test_the_mesh_is_drawn_with_its_groups(driver: Any, service: Service, llm: LLM) -> None:
    meshed = mesh_service(service, llm, tp=8, attn_dp=2, attn_cp=2)
    with listening(build_app(meshed)) as url:
        page = Page(driver, url).ready()
        assert page.count("#mesh .rank") == 8
        assert page.count("#mesh .frame") == 2
        titles = (
            "return [...document.querySelectorAll('#mesh title')].map((each) => each.textContent)"
        )
        assert page.run(titles)[5] == "rank 5: attention DP 1, CP 0, TP 1"
        assert page.text("groups-text") == "attention TP: {0 1} {2 3} {4 5} {6 7}"
        radios = page.driver.find_elements("css selector", "#groups input")
        assert len(radios) == 4
        colours = """return [...document.querySelectorAll("#mesh .rank")]
            .map((each) => getComputedStyle(each).color)"""
        seen = {}
        for radio in radios:
            radio.click()
            seen[page.text("groups-text")] = page.run(colours)
        assert set(seen) == {
            "TP: {0 1 2 3 4 5 6 7}",
            "attention DP: {0 4} {1 5} {2 6} {3 7}",
            "attention CP: {0 2} {1 3} {4 6} {5 7}",
            "attention TP: {0 1} {2 3} {4 5} {6 7}",
        }
        for text, found in seen.items():
            for ranks in text.partition(": ")[2].strip("{}").split("} {"):
                assert len({found[int(rank)] for rank in ranks.split()}) == 1
        assert len(set(seen["attention TP: {0 1} {2 3} {4 5} {6 7}"])) == 4
        boundaries = page.text("lines")
        assert "attn → ffn" in boundaries
        assert "all-reduce TP" in boundaries
        assert page.count("#layer .edge.busy") > 0
        assert page.harm() == []


def test_pipeline_stages_are_drawn_as_they_are_listed(
    driver: Any, service: Service, llm: LLM
) -> None:
    with listening(build_app(service)) as url:
        page = Page(driver, url).ready()
        assert page.count("#mesh .rank") == 1
        assert page.count("#groups input") == 0
        assert (page.count("#pipeline .stage"), page.count("#pipeline .cut")) == (1, 0)
        assert page.run(LAYERS) == ["layers 0\u20132"]
    with listening(build_app(mesh_service(service, llm, pp_stages=2, pp_splits=(1,)))) as url:
        page = Page(driver, url).ready()
        assert (page.count("#pipeline .stage"), page.count("#pipeline .cut")) == (2, 1)
        assert page.run(LAYERS) == ["layers 0\u20130", "layers 1\u20132"]
        first, second = page.run(WIDTHS)
        assert second == pytest.approx(2 * first)
        assert page.harm() == []


def test_a_lost_server_is_shown_and_found_again(driver: Any, service: Service) -> None:
    with listening(build_app(service)) as url:
        page = Page(driver, url).ready()
        assert page.count("body.stale") == 0
    page.wait(lambda: page.text("state").startswith("no answer from the server since"))
    assert page.count("body.stale") == 1
    other = replace(service, settings=ServeSettings(model_name="other"), created=7)
    with listening(build_app(other), urlsplit(url).port or 0):
        page.wait(lambda: page.text("state") == "ready")
        assert page.text("model") == "other"
        assert page.count("body.stale") == 0
        assert page.count("#mesh .rank") == 1


def test_every_control_has_a_name_and_the_keyboard_reaches_it(driver: Any, url: str) -> None:
    from selenium.webdriver.common.keys import Keys

    page = Page(driver, url).ready()
    page.wait(lambda: page.find("text").is_displayed())
    tree = driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = {"button", "textbox", "radio", "meter", "region", "log", "status", "img"}
    named: dict[str, list[str]] = {}
    for node in tree:
        role = node.get("role", {}).get("value")
        if role in roles and not node.get("ignored"):
            named.setdefault(role, []).append(node.get("name", {}).get("value", ""))
    assert set(named["button"]) == {"Send", "Stop", "Clear"}
    assert named["textbox"] == ["Message"]
    assert named["log"] == ["Conversation"]
    for role in set(named) - {"status"}:
        assert all(named[role]), (role, named[role])
    reached = []
    page.find("log").click()
    for _ in range(4):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.run("return document.activeElement.id"))
    # Stop can do nothing yet, and is passed over.
    assert reached[:3] == ["text", "send", "clear"]


# The ratio of luminances as the web's accessibility guidelines (WCAG 2) define it.
CONTRAST = """
const light = (colour) => {
  const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((each) => each / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const card = light(getComputedStyle(document.getElementById("live")).backgroundColor);
return ["model", "running", "running-note", "state", "groups-text"].map((id) => {
  const ink = light(getComputedStyle(document.getElementById(id)).color);
  return (Math.max(ink, card) + 0.05) / (Math.min(ink, card) + 0.05);
});
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_in_light_and_dark(driver: Any, url: str, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    try:
        page = Page(driver, url).ready()
        background = page.run("return getComputedStyle(document.body).backgroundColor")
        shade = [int(part) for part in background.removeprefix("rgb(").rstrip(")").split(",")]
        assert (max(shade) < 64) == (scheme == "dark")
        assert min(page.run(CONTRAST)) > 4.5
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
