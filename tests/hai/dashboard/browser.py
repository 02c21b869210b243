"""A real Chromium, headless, driven by Selenium."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import waiting

CHROMIUM = Path("/usr/bin/chromium")
DRIVER = Path("/usr/bin/chromedriver")

PHONE, DESKTOP = (360, 740), (1280, 800)

PATIENCE_S = 120.0


def missing() -> str:
    """Why it cannot be used here; empty: it can."""
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed (pip install 'fireflyer[dev]')"
    for path in (CHROMIUM, DRIVER):
        if not path.exists():
            return f"{path} is missing: scripts/setup.sh --all-test-packages as root (Chromium)"
    return ""


class Browser:
    """One profile: its own cookies.

    Args:
        folder: for the profile; empty.
        scripts: whether pages may run theirs.
    """

    def __init__(self, folder: Path, *, scripts: bool = True) -> None:
        from selenium.webdriver import Chrome
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service

        options = Options()
        options.binary_location = str(CHROMIUM)
        for flag in (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
            "--no-first-run", f"--user-data-dir={folder / 'profile'}",
        ):  # fmt: skip
            options.add_argument(flag)
        if not scripts:
            options.add_argument("--blink-settings=scriptEnabled=false")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver: Any = Chrome(options=options, service=Service(str(DRIVER)))

    def close(self) -> None:
        self.driver.quit()

    def look(self, size: tuple[int, int], *, dark: bool = False) -> None:
        """Size of the window, of a phone with touch or not, and the colours that are asked for."""
        width, height = size
        metrics = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": size == PHONE,
        }
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})

    def open(self, address: str) -> None:
        self.driver.get(address)

    def run(self, script: str) -> Any:
        """What a script in the page returns."""
        return self.driver.execute_script(script)

    def find(self, selector: str) -> Any:
        """The first element; waits for it."""
        from selenium.webdriver.common.by import By

        self.until(lambda: bool(self.driver.find_elements(By.CSS_SELECTOR, selector)), selector)
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str = "body") -> str:
        """Of the first element, as the page has it now; empty where there is none."""
        found = self.run(f"return document.querySelector({selector!r})?.textContent ?? ''")
        return str(found)

    def until(self, true: Callable[[], bool], what: str) -> None:
        """Waits until something is true."""
        waiting.until(true, lambda: f"{what}: {self.driver.current_url}\n{self.text()}")

    def until_text(self, selector: str, words: str) -> None:
        self.until(lambda: words in self.text(selector), f"{words!r} in {selector}")

    def complaints(self) -> list[str]:
        """What the console has said since the last time: errors of scripts, violations of the policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def overhang(self) -> int:
        """Pixels that the page is wider than the window."""
        found = self.run(
            "const page = document.documentElement; return page.scrollWidth - page.clientWidth"
        )
        return int(found)

    def wide(self) -> list[str]:
        """Elements that reach beyond the right edge of the window, and drawings beyond that of what
        they are in; but for what scrolls."""
        found = self.run(
            "const right = (e) => e.getBoundingClientRect().right;"
            "const edge = (e) => e.tagName == 'svg' ? right(e.parentElement)"
            " : document.documentElement.clientWidth;"
            "return [...document.querySelectorAll('body *')].filter((e) => right(e) > edge(e) + 1"
            " && !e.parentElement.closest('svg, .scroll') && !e.closest('.skip'))"
            ".map((e) => `${e.tagName}#${e.id}.${e.className.baseVal ?? e.className}`)"
        )
        return list(found)

    def picture(self, path: Path) -> None:
        """What the window shows, as PNG."""
        self.driver.save_screenshot(str(path))
