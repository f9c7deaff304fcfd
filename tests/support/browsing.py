"""Drive headless Chromium through Selenium."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

from skips import require_program
from waiting import wait_until

SCREENSHOTS = Path(__file__).resolve().parents[2] / "test-artifacts"  # ignored by git
SIZE = "1400,2400"
SCRIPT_S = 300.0  # far above any script of a test
PRESS_AGAIN = 5.0  # seconds after a click that saved nothing
T = TypeVar("T")
GREY = 20  # maximum difference between red, green and blue of a pixel that counts as grey


class Browser:
    """One browser window. downloads: the folder of saved files."""

    def __init__(self, driver: webdriver.Chrome, downloads: Path) -> None:
        self._driver = driver
        self._downloads = downloads

    def open(self, url: str) -> None:
        self._driver.get(url)

    def run(self, script: str, *arguments: object) -> Any:
        """Return what a script in the page returns; its arguments are those of the function that it is the body of."""
        return self._driver.execute_script(script, *arguments)

    def run_until_called(self, script: str, *arguments: object) -> Any:
        """Return what a script in the page passes to its last argument, a function."""
        self._driver.set_script_timeout(SCRIPT_S)
        return self._driver.execute_async_script(script, *arguments)

    def evaluate(self, source: str) -> None:
        """Run a program in the page, which its policy does not concern."""
        self._driver.execute_cdp_cmd("Runtime.evaluate", {"expression": source})

    def resize(self, width: int, height: int) -> None:
        """Change the size of the page in CSS pixels; a window cannot be as narrow as a telephone."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, media: str = "", **features: str) -> None:
        """Emulate what the user's system prefers: prefers_color_scheme="dark". media: "print"."""
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": wanted})

    def allow_scripts(self, allowed: bool) -> None:
        """Turn the scripts of the next page on or off."""
        self._driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not allowed})

    def point_at(self, selector: str, share: float) -> None:
        """Move the pointer over an element, to a share of its width from the left."""
        element = self._driver.find_element(By.CSS_SELECTOR, selector)
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
        offset = round((share - 0.5) * element.size["width"])
        ActionChains(self._driver).move_to_element_with_offset(element, offset, 0).perform()

    def click(self, selector: str) -> None:
        """Click an element as a user does: it has to be visible."""
        element = self._driver.find_element(By.CSS_SELECTOR, selector)
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
        element.click()

    def type(self, *keys: str) -> None:
        """Press keys, as a user does wherever the focus is."""
        ActionChains(self._driver).send_keys(*keys).perform()

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the last call, that of the page among them; no data: URLs."""
        messages = [json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance")]
        sent = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def console(self) -> list[str]:
        """Return the lines of the console since the last call: errors and refusals of a policy, too."""
        return [str(entry["message"]) for entry in self._driver.get_log("browser")]

    @property
    def text(self) -> str:
        """The visible text of the page."""
        return str(self._driver.find_element(By.TAG_NAME, "body").text)

    def wait_until(self, condition: Callable[[], T | None], what: str) -> T:
        """Return the first true value of a condition. Elements may become stale, because the page redraws itself."""

        def holds() -> T | None:
            with contextlib.suppress(StaleElementReferenceException, NoSuchElementException):
                return condition()
            return None

        return wait_until(holds, what)

    def count(self, selector: str) -> int:
        """Return the number of elements that match a CSS selector."""
        return len(self._driver.find_elements(By.CSS_SELECTOR, selector))

    def attributes(self, name: str) -> list[str]:
        """Return the values of an attribute of all elements that have it, from the top of the page."""
        elements = self._driver.find_elements(By.CSS_SELECTOR, f"[{name}]")
        return [str(element.get_attribute(name)) for element in elements]

    def download_csv(self, selector: str) -> list[dict[str, str]]:
        """Press a button that downloads a CSV file, and return its rows."""
        for old in self._downloads.iterdir():
            old.unlink()
        pressed = 0.0

        def newest() -> Path | None:
            # The page replaces its charts with each new point: a click on a button that was just replaced is lost.
            nonlocal pressed
            if files := list(self._downloads.glob("*.csv")):
                return max(files, key=lambda path: path.stat().st_mtime_ns)
            if time.monotonic() > pressed + PRESS_AGAIN:
                button = self._driver.find_element(By.CSS_SELECTOR, selector)
                self._driver.execute_script("arguments[0].click()", button)
                pressed = time.monotonic()
            return None

        path = self.wait_until(newest, f"{selector} saves a file")
        with path.open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def count_colored_pixels(self, selector: str) -> int:
        """Return the number of colored pixels of an element: its curves, without axes and frames, which are grey."""
        shot = self._driver.find_element(By.CSS_SELECTOR, selector).screenshot_as_png
        colours = Image.open(io.BytesIO(shot)).convert("RGB").getcolors(maxcolors=1 << 24) or []
        return sum(number for number, rgb in colours if max(rgb) - min(rgb) > GREY)

    def save_screenshot(self, name: str) -> Path:
        """Save a screenshot of the window."""
        SCREENSHOTS.mkdir(exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        assert self._driver.save_screenshot(str(path))
        return path


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Open a window that saves downloads to this folder."""
    folder.mkdir()
    options = Options()
    options.binary_location = str(require_program("chromium"))
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={SIZE}"):
        options.add_argument(option)
    options.add_experimental_option(
        "prefs",
        {
            "download.default_directory": str(folder),
            "profile.default_content_setting_values.automatic_downloads": 1,
        },
    )
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(require_program("chromedriver"))))
    try:
        yield Browser(driver, folder)
    finally:
        driver.quit()
