"""A headless Chromium, what it noticed of a page, and a server in a thread for it to ask."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from layline.serve.server import bind, listen, url_of
from support.serving import wait_for

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--window-size=1300,1400"),
)
WAIT_S = 30
# What a page runs that it should not: the texts of the tests call hit().
WATCH = """
window.hits = [];
window.hit = (what) => { window.hits.push(`ran ${what}`); };
window.alert = window.confirm = window.prompt = (what) => { window.hits.push(`dialog ${what}`); };
document.addEventListener("securitypolicyviolation", (event) => {
  window.hits.push(`policy ${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
});
"""
# Elements that only a text which became HTML can have made: the page's own are known.
STRANGERS = """
const own = new Set([...document.querySelectorAll("header > img, head > script")]);
const found = [...document.querySelectorAll("img, script, iframe, object, embed, a, style, b b")]
  .filter((each) => !own.has(each));
for (const each of document.querySelectorAll("*"))
  for (const { name, value } of each.attributes)
    if (name.startsWith("on") || /^\\s*javascript:/i.test(value)) found.push(each);
return found.map((each) => `element ${each.outerHTML.slice(0, 120)}`);
"""


def missing_browser() -> str | None:
    """Why there is no browser to test with, or None."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    if not any(map(shutil.which, CHROMIUM)):
        return "no chromium here; on Debian: apt install chromium chromium-driver"
    if shutil.which("chromedriver") is None:
        return "no chromedriver here; on Debian: apt install chromium-driver"
    return None


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """A driver of a browser of its own."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, CHROMIUM)))
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(service=Service(shutil.which("chromedriver")), options=options)
    try:
        driver.set_page_load_timeout(WAIT_S)
        driver.set_script_timeout(WAIT_S)
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
        yield driver
    finally:
        driver.quit()


class Page:
    """The status page in a browser."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url
        driver.get("about:blank")
        for kind in ("browser", "performance"):
            driver.get_log(kind)
        driver.get(url)

    def find(self, name: str) -> Any:
        """The element with this id."""
        return self.driver.find_element("id", name)

    def count(self, selector: str) -> int:
        """How many elements a CSS selector finds."""
        return len(self.driver.find_elements("css selector", selector))

    def text(self, name: str) -> str:
        """The text of an element as it is in the document."""
        found: str = self.find(name).get_property("textContent")
        return found

    def wait(self, true: Callable[[], Any]) -> Any:
        """What ``true`` returns once it is."""
        return wait_for(true, WAIT_S)

    def ready(self) -> Page:
        """Wait until the page shows numbers."""
        self.wait(lambda: self.text("running").isdecimal())
        return self

    def console(self) -> list[str]:
        """Errors and warnings since the last look."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requested(self) -> list[str]:
        """Every address that was asked for since the last look."""
        messages = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def harm(self) -> list[str]:
        """Signs that a text became HTML or a script; none where all is well."""
        found: list[str] = self.driver.execute_script("return window.hits")
        found += self.driver.execute_script(STRANGERS)
        return [*found, *[f"console {message}" for message in self.console()]]

    def run(self, script: str) -> Any:
        """The value of a script's ``return``."""
        return self.driver.execute_script(script)


@contextmanager
def listening(app: Any, port: int = 0) -> Iterator[str]:
    """Serve an application in a thread; where."""
    sock = bind("127.0.0.1", port)
    listen(sock, "127.0.0.1", port)
    config = uvicorn.Config(
        app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield f"{url_of(sock)}/"
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        sock.close()
        assert not thread.is_alive()
