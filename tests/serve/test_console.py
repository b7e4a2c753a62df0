"""The console in a real browser: add, see that it holds, ask before and after, remove, roll back."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from endpoint_process import free_port
from endpoints import world_facts
from one_process import Endpoint

pytestmark = pytest.mark.slow
FACTS = world_facts(3)
SCREENSHOTS = os.environ.get("MALMEN_SCREENSHOTS")  # a folder: take the pictures of docs/


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The console's address, with the admin's token."""
    endpoint = Endpoint(tmp_path_factory.mktemp("console"))
    server = uvicorn.Server(uvicorn.Config(endpoint.app, host="127.0.0.1", port=free_port(), log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    ends = time.monotonic() + 30
    while not server.started and time.monotonic() < ends:
        time.sleep(0.05)  # between two looks; the wait is bounded above
    assert server.started
    yield f"http://127.0.0.1:{server.config.port}/#token={endpoint.tokens['admin']}"
    server.should_exit = True
    thread.join(30)
    endpoint.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("NO CHROMIUM IS INSTALLED: the console was not tried in a browser (apt-get install chromium)")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", "--no-first-run"]  # fmt: skip
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=quiet)
        yield chromium
        chromium.close()


def picture(page: Any, name: str) -> None:
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS) / f"console-{name}.png", full_page=True)


def test_a_fact_is_added_seen_to_hold_asked_for_removed_and_rolled_back(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.set_default_timeout(30_000)
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    page.on("console", lambda said: broken.append(said.text) if said.type == "error" else None)
    page.goto(address)
    assert "#token" not in page.url  # the token does not stay in the address bar
    fact = FACTS[0]
    page.locator(".fact-prompt").first.fill(fact.prompt)
    page.locator(".fact-answer").first.fill(fact.answer)
    page.locator("#dry-run").click()
    page.locator(".fact-result").first.get_by_text("would hold").wait_for()
    page.locator("#publish").click()
    page.locator("#edits-table").get_by_text(fact.prompt).wait_for()
    page.locator("#ask-prompt").fill(fact.prompt)
    page.locator("#ask").click()
    page.locator("#answer-after").get_by_text(fact.answer).wait_for()
    assert fact.answer not in page.locator("#answer-before").inner_text()
    picture(page, "published")
    page.locator("button[data-remove]").first.click()
    page.locator("button[data-confirm]").first.click()
    page.locator("#edits-table").get_by_text(fact.prompt).wait_for(state="detached")
    page.locator("#ask").click()
    page.locator("#answer-after").get_by_text(fact.answer).wait_for(state="detached")
    page.locator("button[data-live]").nth(0).wait_for()
    page.locator("#versions-table button[data-live]").first.click()  # the version that held the fact
    page.locator("button[data-confirm]").first.click()
    page.locator("#edits-table").get_by_text(fact.prompt).wait_for()
    page.locator("#ask").click()
    page.locator("#answer-after").get_by_text(fact.answer).wait_for()
    picture(page, "rolled-back")
    assert broken == []
    page.close()


def test_the_console_is_legible_on_a_phone_and_in_the_dark(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
    page.goto(address)
    page.locator("#status").wait_for()
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 360
    small = page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => e.childNodes.length && e.offsetParent &&"
        " parseFloat(getComputedStyle(e).fontSize) < 14).map(e => e.outerHTML.slice(0, 80))"
    )
    assert small == []
    picture(page, "phone-dark")
    page.close()


def test_a_wrong_token_is_told(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(address.split("#")[0] + "#token=wrong")
    page.locator("#connection").get_by_text("refused").wait_for(timeout=15_000)  # not there before it was tried
    page.close()
