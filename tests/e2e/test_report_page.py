"""The report in headless Chromium: it draws, filters, loads nothing; texts of runs stay texts."""

import json
import warnings
from pathlib import Path

import pytest
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from megappo.cli import main
from tests.unit.report.made_run import EVIL, make

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--window-size=1400,1000",
)  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Two runs in one page, open in a browser."""
    missing = [path for path in (CHROMIUM, DRIVER) if not Path(path).exists()]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: bash tests/install_system.sh installs them")
    folder = tmp_path_factory.mktemp("report")
    runs = [make(folder / "first"), make(folder / "second", steps=9, shift=0.5)]
    assert main(["report", *map(str, runs)]) == 0
    browser = start_browser(folder)
    try:
        browser.get((runs[0] / "report.html").as_uri())
        yield browser
    finally:
        browser.quit()


def start_browser(folder, tries=3):
    """Chromium that gives up at its start, as it may on a loaded machine, is started again."""
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={folder / f'browser_{tries}'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    try:
        return Chrome(options=options, service=ChromeService(DRIVER))
    except WebDriverException as error:
        if tries == 1:
            raise
        warnings.warn(f"the browser did not start: {error}", stacklevel=2)
        return start_browser(folder, tries - 1)


def find(browser, selector):
    return browser.find_elements(By.CSS_SELECTOR, selector)


def fill(browser, name, text):
    field = browser.find_element(By.ID, name)
    field.clear()
    browser.execute_script(
        "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))",
        field, text,
    )  # fmt: skip


def choose(browser, name, text):
    Select(browser.find_element(By.ID, name)).select_by_visible_text(text)


def test_it_opens_without_an_error_and_asks_for_nothing_but_itself(report):
    assert [entry for entry in report.get_log("browser") if entry["level"] == "SEVERE"] == []
    messages = [json.loads(e["message"])["message"] for e in report.get_log("performance")]
    asked = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
        and message["params"]["documentURL"] == report.current_url  # not the browser's own pages
    ]
    assert asked.count(report.current_url) == 1
    assert [u for u in asked if not u.startswith(("data:", "blob:", report.current_url))] == []


def test_every_panel_draws_its_lines(report):
    charts = find(report, ".chart")
    assert len(find(report, "#curve-grid .chart")) == 4  # of what the made run has
    assert len(find(report, "#mismatch-grid .chart")) == 2
    assert all(chart.find_elements(By.CSS_SELECTOR, "svg.main-svg") for chart in charts)
    score = charts[0].find_elements(By.CSS_SELECTOR, ".scatterlayer path.js-line")
    assert len(score) == 4  # two runs, each raw and smoothed
    assert find(report, "#time-grid .barlayer path")
    assert len(find(report, "#spread-grid .heatmaplayer image")) == 2
    marks = charts[0].find_elements(By.CSS_SELECTOR, ".scatterlayer .points path")
    assert len(marks) >= 2  # the guard's event of each run


def test_the_slider_smooths_and_events_can_be_hidden(report):
    read = "return document.querySelector('.chart').data.map(t => [t.name, t.y])"
    smoothed = report.execute_script(read)
    fill(report, "smoothing", "0")
    raw = report.execute_script(read)
    fill(report, "smoothing", "0.6")
    line = raw[0][1]
    assert line[:3] == [0.1, 0.2, 0.3]
    # smoothing 0.6: weights 0.6^k over their sum
    assert smoothed[1][1][1] == pytest.approx((0.1 * 0.6 + 0.2) / 1.6)
    assert smoothed[1][1][2] == pytest.approx((0.1 * 0.36 + 0.2 * 0.6 + 0.3) / 1.96)
    report.execute_script("document.getElementById('show-events').click()")
    assert "events" not in [name for name, _ in report.execute_script(read)]
    report.execute_script("document.getElementById('show-events').click()")


def test_the_table_of_events_is_filtered_by_kind(report):
    assert len(find(report, "#event-rows tr")) == 2
    assert EVIL.split("\u2028")[0].strip() in find(report, "#event-rows tr")[0].text
    choose(report, "event-kind", "all")
    assert len(find(report, "#event-rows tr")) == 6
    choose(report, "event-kind", "saved")
    assert {row.text.split()[2] for row in find(report, "#event-rows tr")} == {"saved"}


def shown(browser):
    return [
        (int(c.get_attribute("data-step")), float(c.get_attribute("data-score")))
        for c in find(browser, ".sample")
    ]


def test_samples_stand_side_by_side_and_are_filtered(report):
    assert len(find(report, ".column")) == 3
    assert {step for step, _ in shown(report)} == {1, 6, 12}
    fill(report, "score-low", "1")
    assert shown(report) == [(step, 1.0) for step in (1, 1, 1, 6, 6, 6, 12, 12, 12)]
    choose(report, "source", "words")
    assert len(shown(report)) == 6
    fill(report, "text", "answer 5")
    assert shown(report) == [(1, 1.0), (6, 1.0), (12, 1.0)]
    choose(report, "view", "list")
    fill(report, "step-low", "4")
    fill(report, "step-high", "9")
    assert [step for step, _ in shown(report)] == list(range(4, 10))
    for field in ("score-low", "text", "step-low", "step-high"):
        fill(report, field, "")
    choose(report, "source", "all")
    fill(report, "row", "2")
    assert [step for step, _ in shown(report)] == list(range(1, 13))
    fill(report, "row", "")
    choose(report, "view", "steps side by side")


def test_tokens_are_coloured_by_their_log_probs(report):
    first = find(report, ".sample .response .token")[:3]
    assert [t.get_attribute("title") for t in first] == ["-0.5 nats", "-4 nats", "0 nats"]
    shades = [t.value_of_css_property("background-color") for t in first]
    assert shades == ["rgba(214, 69, 44, 0.08)", "rgba(214, 69, 44, 0.64)", "rgba(214, 69, 44, 0)"]


def test_panels_follow_the_chosen_run(report):
    choose(report, "run", "second")
    assert {step for step, _ in shown(report)} == {1, 5, 9}
    assert "second: 54 of 54" in report.find_element(By.ID, "sample-count").text
    choose(report, "run", "first")


def test_a_sample_that_looks_like_html_stays_text(report):
    assert report.title == "first, second - megappo report"
    texts = [
        report.execute_script("return arguments[0].textContent", e)
        for e in find(report, ".sample .response")
    ]
    assert EVIL + "<end>" in texts
    assert find(report, "img, .sample b, .sample script") == []
    assert [entry for entry in report.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_the_pages_own_files_name_no_address():
    for path in (Path(__file__).parents[2] / "megappo" / "report").glob("*.[hjc]*"):
        assert "://" not in path.read_text(), path
