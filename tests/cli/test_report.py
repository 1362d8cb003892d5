"""The report in a browser, and its tables and plots in W&B."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Result
from tests.wandb_files import history, records

RECORDED = Path(__file__).parents[1] / "reports" / "recorded"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from recsys_topk.cli.main import main

    target = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", str(RECORDED), "--out", str(target)]) == 0
    return target


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
    yield driver
    driver.quit()


def set_width(browser: Any, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def test_page_renders_in_a_browser_without_external_requests(browser: Any, page: Path) -> None:
    set_width(browser, 1100)
    browser.get(page.as_uri())
    pictures = browser.find_elements("css selector", "figure svg")
    assert len(pictures) >= 4
    for picture in pictures:
        assert picture.size["width"] > 300
        assert picture.size["height"] > 100
        assert picture.get_attribute("aria-label")
    for table in browser.find_elements("css selector", "table"):
        assert table.find_elements("css selector", "tbody td")
        # A folded table has no visible text.
        assert browser.find_element("id", table.get_attribute("aria-labelledby")).get_attribute("textContent")
    for link in browser.find_elements("css selector", "nav a"):
        assert browser.find_elements("id", link.get_attribute("href").partition("#")[2])

    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent" and m["params"]["documentURL"].startswith(page.as_uri())
    ]  # without requests of the browser's first tab
    assert page.as_uri() in sent
    assert [address for address in sent if not address.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("width", [400, 1100])
def test_page_does_not_scroll_horizontally(browser: Any, page: Path, width: int) -> None:
    set_width(browser, width)
    browser.get(page.as_uri())
    assert browser.execute_script("return window.innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_click_on_a_heading_sorts_the_column(browser: Any, page: Path) -> None:
    set_width(browser, 1100)
    browser.get(page.as_uri())
    heading = browser.find_element("css selector", "table thead th:nth-child(2)")

    def column() -> list[float]:
        cells = browser.find_elements("css selector", "table:first-of-type tbody td:nth-child(2)")
        first = browser.find_element("css selector", "table")
        return [float(cell.text) for cell in cells if cell.find_element("xpath", "ancestor::table") == first]

    button = heading.find_element("css selector", "button")
    button.click()
    assert column() == sorted(column(), reverse=True)
    button.click()
    assert column() == sorted(column())
    assert heading.get_attribute("aria-sort") == "ascending"


def test_tables_and_plots_are_logged_to_wandb(recsys_topk: Callable[..., Result], tmp_path: Path) -> None:
    done = recsys_topk("report", str(RECORDED / "main-table"), "--out", "r.html", "--logger", "wandb")
    assert done.returncode == 0, done.stderr
    (run,) = tmp_path.glob("wandb/offline-run-*")
    assert str(run.relative_to(tmp_path)) in done.stdout
    (file,) = run.glob("*.wandb")
    logged = {name: value for row in history(records(file)) for name, value in row.items()}
    assert logged["report/the-main-table/table-1/_type"] == "table-file"
    assert logged["report/the-main-table/plot-1/_type"] == "image-file"
    assert logged["report/page/_type"] == "html-file"
    table = json.loads((run / "files" / logged["report/the-main-table/table-1/path"]).read_text())
    assert table["columns"][:2] == ["run", "joint @10@20"]
    assert "dftopk" in [row[0] for row in table["data"]]
