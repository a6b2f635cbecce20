"""Prefect's dashboard, used as a person uses it: pages, forms and buttons, and no call to its API."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PICTURES_ENV = "REPERTORY_PICTURES"
"""Folder that keeps what was seen, as docs/ui is made."""
SIZE = {"width": 1100, "height": 800}
PAGE_LIMIT_MS = 30_000
MAX_PRESSES = 8
"""Of Submit."""


class Dashboard:
    """One browser window on the dashboard of a Prefect server."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self._url = page, url

    def custom_run(self, flow: str, name: str, fields: Mapping[str, str | int]) -> None:
        """Fill in the run form of a deployment, changing these fields alone, and submit it."""
        self.open_form(flow, name)
        for field, value in fields.items():
            box = self.page.get_by_label(f"{field} (Optional)", exact=True)
            box.fill(str(value))
        self.submit()

    def open_form(self, flow: str, name: str) -> None:
        self.open_deployment(flow, name)
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Custom run").click()
        self.page.get_by_label("run_id (Optional)", exact=True).wait_for()

    def submit(self) -> None:
        """Send the form; the deployment's page comes back once the server has taken it.

        Pressed again when the dashboard says that it wasn't taken: a Prefect server on SQLite answers 503
        when somebody else wrote while it read the deployment, and unlike Prefect's client the dashboard asks
        once.
        """
        taken = re.compile(r"/deployments/deployment/[0-9a-f-]+(\?|$)")
        for _ in range(MAX_PRESSES):
            self.page.get_by_role("button", name="Submit").click()
            refused = self.page.get_by_text("Unknown error while creating flow run.").first
            deadline = time.monotonic() + PAGE_LIMIT_MS / 1000
            while time.monotonic() < deadline and not refused.is_visible():
                if taken.search(self.page.url):
                    return
                self.page.wait_for_timeout(100)
            refused.wait_for(state="hidden")  # it lies over the button
        raise AssertionError(f"the run form was not taken in {MAX_PRESSES} presses of Submit")

    def open_deployment(self, flow: str, name: str) -> None:
        self._go("/v2/deployments")
        row = self.page.get_by_role("row").filter(has=self.page.get_by_role("link", name=flow, exact=True))
        row.get_by_role("link", name=name, exact=True).click()
        self.page.get_by_role("button", name="Run", exact=True).wait_for()

    def open_run(self, name: str, *, limit_s: float = 60) -> None:
        """The page of the newest flow run of this name, from the list of runs."""
        self._go("/v2/runs")
        self.page.get_by_role("link", name=name, exact=True).first.click(timeout=limit_s * 1000)
        self.page.get_by_role("tab", name="Details").wait_for()

    def until_state(self, state: str, *, limit_s: float) -> None:
        """Wait until the open run's page says so; it refreshes itself."""
        badge = self.page.locator("main").get_by_text(state, exact=True).first
        badge.wait_for(timeout=limit_s * 1000)

    def open_subflow(self, name: str) -> None:
        """From a run's page to that of a run it started."""
        self.page.get_by_role("tab", name="Subflow Runs").click()
        self.page.get_by_role("link", name=name).first.click()
        self.page.get_by_role("tab", name="Details").wait_for()

    def until_task(self, name: str, *, limit_s: float) -> None:
        """Wait until the open run's list of tasks shows one of this name."""
        self.page.get_by_role("tab", name="Task Runs").click()
        self.page.get_by_role("link", name=name).first.wait_for(timeout=limit_s * 1000)

    def menu(self, item: str) -> None:
        """Choose from the open page's own menu."""
        self.page.locator("main").get_by_role("button", name="Open menu").first.click()
        self.page.get_by_role("menuitem", name=item).click()

    def picture(self, name: str) -> None:
        """Keep what is seen now, when somebody asked for pictures."""
        folder = os.environ.get(PICTURES_ENV)
        if folder:
            from PIL import Image

            path = Path(folder) / f"{name}.png"
            self.page.wait_for_timeout(1500)  # lists and charts are drawn after the page
            self.page.screenshot(path=path)
            Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)  # a third of the bytes

    def _go(self, path: str) -> None:
        self.page.goto(f"{self._url}{path}", wait_until="domcontentloaded")


@contextmanager
def open_dashboard(url: str) -> Iterator[Dashboard]:
    """Skips the test where playwright or a browser is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium on the PATH")
    with api.sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--no-proxy-server"]
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        page = browser.new_page(viewport=SIZE, device_scale_factor=0.7)
        page.set_default_timeout(PAGE_LIMIT_MS)
        dashboard = Dashboard(page, url)
        try:
            yield dashboard
        except BaseException:
            dashboard.picture("failed")
            raise
        finally:
            browser.close()
