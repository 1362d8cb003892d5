"""The page of the service in headless Chromium: keyboard only, desktop and phone width, no external resources."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recsys_topk.serving.recommend import CascadeRecommender
from tests.serving.running import Running, serving

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if BROWSER is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver on the path")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
                 "disable-background-networking", "disable-component-update", "disable-dev-shm-usage",
                 f"user-data-dir={tmp_path_factory.mktemp('profile')}"):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.implicitly_wait(30)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def service(export: Path) -> Iterator[Running]:
    with serving(export) as running:
        yield running


def open_page(browser: Any, service: Running, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(service.url)
    assert browser.find_elements("css selector", "#stages section")


def save_screenshot_if_asked(browser: Any, name: str) -> None:
    """Save a screenshot in the folder $RECSYS_TOPK_PICTURES, if it is set."""
    if folder := os.environ.get("RECSYS_TOPK_PICTURES"):
        browser.save_screenshot(str(Path(folder) / name))


@pytest.mark.parametrize("width", [1100, pytest.param(360, marks=pytest.mark.long)])
def test_page_shows_the_funnel_and_works_by_keyboard(
    browser: Any, service: Running, recommender: CascadeRecommender, width: int
) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    assert recommender.users is not None
    user = recommender.users.names[6].item()
    passages = recommender.passages([user])[0]
    dropped = recommender.items.names[passages[1].rows[-1]].item()
    open_page(browser, service, width)
    keys = ActionChains(browser)

    def press(*pressed: str) -> None:
        keys.send_keys(*pressed).perform()

    def focused() -> Any:
        return browser.switch_to.active_element

    # Tab moves from the top of the page to the user, the item, the box and the button.
    press(Keys.TAB)
    assert focused().get_attribute("id") == "user"
    press(*[Keys.BACKSPACE] * 12, str(user), Keys.ESCAPE, Keys.TAB, str(dropped), Keys.TAB)
    assert focused().get_attribute("id") == "seen"
    press(Keys.TAB)
    assert focused().text == "Show"
    press(Keys.ENTER)
    WebDriverWait(browser, 30).until(lambda page: f"User {user}:" in page.find_element("id", "message").text)
    assert f"preranking drops item {dropped}" in browser.find_element("id", "why").text
    sections = browser.find_elements("css selector", "#stages section")
    assert [one.get_attribute("aria-label") for one in sections] == ["retrieval", "preranking", "ranking"]
    for section, passage in zip(sections, passages, strict=True):
        shown = [one.get_attribute("data-item") for one in section.find_elements("css selector", "li")]
        assert shown == [str(recommender.items.names[row]) for row in passage.rows]
        kept = section.find_elements("css selector", "li.kept")
        assert len(kept) == min(passage.quota, len(passage.rows))
    press(Keys.TAB)  # the first item of the first stage
    first, second = (one.get_attribute("data-item") for one in sections[0].find_elements("css selector", "li")[:2])
    for key, wanted in ((Keys.ARROW_DOWN, second), (Keys.ARROW_UP, first), (Keys.ARROW_UP, first)):
        press(key)
        assert browser.find_element("css selector", "li.marked").get_attribute("data-item") == wanted
        assert focused().find_element("xpath", "..").get_attribute("data-item") == wanted
    kept = recommender.items.names[passages[0].kept].tolist()
    press(Keys.ARROW_RIGHT)  # the same item in the next stage
    assert str(focused().find_element("xpath", "..").get_attribute("data-item")) == str(kept[0])
    assert focused().find_element("xpath", "ancestor::section").get_attribute("aria-label") == "preranking"
    press(Keys.ARROW_LEFT)
    marked = browser.find_elements("css selector", "li.marked")
    assert {one.get_attribute("data-item") for one in marked} == {
        sections[0].find_element("css selector", "li").get_attribute("data-item")
    }
    assert "285" in browser.find_element("id", "picture").get_attribute("aria-label")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    labels = [one.rect for one in browser.find_elements("css selector", "#picture text:not(.number)")]
    ends = [one["x"] + one["width"] for one in labels]
    assert all(end <= one["x"] for end, one in zip(ends, labels[1:], strict=False)), "labels overlap"
    save_screenshot_if_asked(browser, f"page-{width}.png")


def test_page_shows_an_error_for_an_unknown_user(browser: Any, service: Running) -> None:
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    open_page(browser, service, 800)
    field = browser.find_element("id", "user")
    field.clear()
    field.send_keys("nobody", Keys.ENTER)
    WebDriverWait(browser, 30).until(lambda page: "no user" in page.find_element("id", "message").text)
    assert browser.find_element("id", "message").get_attribute("class") == "error"
    # The funnel of the user before is gone.
    assert browser.execute_script("return document.querySelectorAll('section').length") == 0
    assert browser.find_element("id", "picture").get_attribute("hidden")
    assert browser.find_element("id", "why").text == ""


def test_page_loads_no_external_resource_and_logs_no_error(browser: Any, service: Running) -> None:
    browser.get_log("performance")
    browser.get_log("browser")
    open_page(browser, service, 1100)
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert sent
    assert [url for url in sent if not url.startswith((service.url, "data:"))] == []
    wrong = [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert [entry for entry in wrong if "favicon" not in entry["message"]] == []
