"""Drive headless Chromium through Selenium."""

from __future__ import annotations

import contextlib
import csv
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from skips import require_program
from waiting import wait_until

SCREENSHOTS = Path(__file__).resolve().parents[2] / "test-artifacts"  # ignored by git
SIZE = "1400,2400"
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
    driver = webdriver.Chrome(options=options, service=Service(str(require_program("chromedriver"))))
    try:
        yield Browser(driver, folder)
    finally:
        driver.quit()
