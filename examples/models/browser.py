"""A headless Chromium that opens pages; for tests and benchmarks. Debian has it in chromium and chromium-driver."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1280,1000",
)  # fmt: skip


def why_no_browser() -> str:
    """What is missing to open a page; "" where nothing is."""
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return "selenium is not installed; pip install 'memopt[dev]'"
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        return "Chromium is not installed; apt-get install chromium chromium-driver"
    return ""


@contextmanager
def chromium() -> Iterator[Any]:
    """A selenium driver of a Chromium with a profile of its own, which logs all that pages write to the console."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
        try:
            yield driver
        finally:
            driver.quit()


def open_page(driver: Any, path: Path, scheme: str = "light") -> None:
    """Open a file in a colour scheme of the system ("light" or "dark")."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    driver.get(path.resolve().as_uri())
