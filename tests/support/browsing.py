"""Drive headless Chromium through Selenium."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

from skips import require_program
from waiting import wait_until

SCREENSHOTS = Path(__file__).resolve().parents[2] / "test-artifacts"  # ignored by git
T = TypeVar("T")


class Browser(webdriver.Chrome):
    """One browser window."""

    downloads: Path  # folder of saved files

    def emulate(self, width: int = 1280, *, media: str = "", scheme: str = "light") -> None:
        """Change the width of the page in CSS pixels, its medium ("print"), and what colours the system prefers."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})

    def allow_scripts(self, allowed: bool) -> None:
        """Turn the scripts of the next page on or off."""
        self.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not allowed})

    def point_at(self, selector: str, share: float) -> None:
        """Move the pointer over an element, to a share of its width from the left."""
        element = self.find_element(By.CSS_SELECTOR, selector)
        self.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
        offset = round((share - 0.5) * element.size["width"])
        ActionChains(self).move_to_element_with_offset(element, offset, 0).perform()

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the last call, that of the page among them; no data: URLs."""
        messages = [json.loads(entry["message"])["message"] for entry in self.get_log("performance")]
        sent = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def console(self) -> list[str]:
        """Return the lines of the console since the last call: errors and refusals of a policy, too."""
        return [str(entry["message"]) for entry in self.get_log("browser")]

    @property
    def text(self) -> str:
        """The visible text of the page."""
        return self.find_element(By.TAG_NAME, "body").text

    def wait_until(self, condition: Callable[[], T | None], what: str) -> T:
        """Return the first true value of a condition. Elements may become stale, because the page redraws itself."""

        def holds() -> T | None:
            with contextlib.suppress(StaleElementReferenceException, NoSuchElementException):
                return condition()
            return None

        return wait_until(holds, what)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Open a window that saves downloads to a new folder."""
    folder.mkdir()
    options = Options()
    options.binary_location = str(require_program("chromium"))
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,2400"):
        options.add_argument(option)
    automatic = "profile.default_content_setting_values.automatic_downloads"
    options.add_experimental_option("prefs", {"download.default_directory": str(folder), automatic: 1})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with Browser(options=options, service=Service(str(require_program("chromedriver")))) as window:
        window.downloads = folder
        yield window
