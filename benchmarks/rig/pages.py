"""How long pages of Prefect's dashboard take to show what they are opened for, in headless Chromium."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VIEW = {"width": 1100, "height": 800}
PAGE_LIMIT_MS = 60_000


@dataclass(frozen=True, slots=True)
class Page:
    """A page is open once each of `shows` is visible in its main part."""

    name: str
    path: str  # below the dashboard's address
    shows: tuple[str, ...]


def missing() -> str | None:
    """What keeps pages from being opened on this machine; None: nothing does."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed"
    return None if _chromium() else "no chromium on the PATH"


def time_pages(
    url: str, pages: Sequence[Page], *, repeats: int, pictures: Path | None = None
) -> dict[str, list[float]]:
    """Page → seconds from its address to its content, each time it was opened, in a window of its own. The
    first opening of all loads the dashboard's code, the others have it cached, as a person's browser has."""
    from playwright.sync_api import sync_playwright

    seconds: dict[str, list[float]] = {page.name: [] for page in pages}
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--no-proxy-server"]
        browser = playwright.chromium.launch(executable_path=_chromium(), args=flags)
        context = browser.new_context(viewport=VIEW)  # type: ignore[arg-type]
        context.set_default_timeout(PAGE_LIMIT_MS)
        for _ in range(repeats):
            for page in pages:
                window = context.new_page()
                seconds[page.name].append(_open(window, url, page))
                if pictures is not None:
                    window.screenshot(path=pictures / f"{page.name.replace(' ', '-')}.png")
                window.close()
        browser.close()
    return seconds


def _open(window: Any, url: str, page: Page) -> float:
    began = time.perf_counter()
    window.goto(f"{url}{page.path}", wait_until="commit")
    for text in page.shows:
        window.locator("main").get_by_text(text).first.wait_for()
    return time.perf_counter() - began


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")
