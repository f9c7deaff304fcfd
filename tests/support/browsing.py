"""A real browser without a screen, driven as a person's would be: Chromium, through its own driver."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from skips import need
from waiting import until

PICTURES = Path(__file__).resolve().parents[2] / "test-artifacts"  # which git ignores
SIZE = "1400,2400"
GREY = 20  # between the strongest and the weakest of red, green, blue


class Browser:
    """One window. downloads: the folder of what is saved."""

    def __init__(self, driver: webdriver.Chrome, downloads: Path) -> None:
        self._driver = driver
        self._downloads = downloads

    def open(self, url: str) -> None:
        self._driver.get(url)

    @property
    def text(self) -> str:
        """Everything that can be read on the page."""
        return str(self._driver.find_element(By.TAG_NAME, "body").text)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a state of the page, which redraws itself meanwhile."""

        def holds() -> object:
            with contextlib.suppress(StaleElementReferenceException):
                return condition()

        until(holds, what)

    def count(self, selector: str) -> int:
        """How many elements of the page fit a CSS selector."""
        return len(self._driver.find_elements(By.CSS_SELECTOR, selector))

    def saved(self, selector: str) -> list[dict[str, str]]:
        """Press a button that saves a table of comma-separated values, and return its rows."""
        for old in self._downloads.iterdir():
            old.unlink()
        button = self._driver.find_element(By.CSS_SELECTOR, selector)
        self._driver.execute_script("arguments[0].click()", button)
        self.until(lambda: list(self._downloads.glob("*.csv")), f"{selector} saves a file")
        (path,) = self._downloads.glob("*.csv")
        with path.open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def coloured(self, selector: str) -> int:
        """How many pixels of an element are neither black, white nor grey: what was painted, not what frames it."""
        shot = self._driver.find_element(By.CSS_SELECTOR, selector).screenshot_as_png
        colours = Image.open(io.BytesIO(shot)).convert("RGB").getcolors(maxcolors=1 << 24) or []
        return sum(number for number, rgb in colours if max(rgb) - min(rgb) > GREY)

    def picture(self, name: str) -> Path:
        """Keep a picture of what is seen now."""
        PICTURES.mkdir(exist_ok=True)
        path = PICTURES / f"{name}.png"
        assert self._driver.save_screenshot(str(path))
        return path


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Open a window; what is saved goes to a folder of its own."""
    folder.mkdir()
    options = Options()
    options.binary_location = str(need("chromium"))
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={SIZE}"):
        options.add_argument(word)
    options.add_experimental_option(
        "prefs",
        {
            "download.default_directory": str(folder),
            "profile.default_content_setting_values.automatic_downloads": 1,
        },
    )
    driver = webdriver.Chrome(options=options, service=Service(str(need("chromedriver"))))
    try:
        yield Browser(driver, folder)
    finally:
        driver.quit()
