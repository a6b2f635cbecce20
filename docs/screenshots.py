"""Takes the pictures of docs/ui from a dashboard that has a config deployed. Needs playwright and chromium.

python docs/screenshots.py http://127.0.0.1:4200 quickstart
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

INTO = Path(__file__).resolve().parent / "ui"
SIZE = {"width": 1100, "height": 900}
LOAD_MS = 6000


def deployments(server: str, name: str) -> dict[str, str]:
    """Flow → id of its deployment of this name."""
    secret = os.environ.get("PREFECT_API_AUTH_STRING", "")
    user, _, password = secret.partition(":")
    with httpx.Client(base_url=f"{server}/api", trust_env=False, timeout=15) as http:
        http.auth = (user, password) if secret else None
        flows = {flow["id"]: flow["name"] for flow in http.post("/flows/filter", json={}).json()}
        found = http.post("/deployments/filter", json={"deployments": {"name": {"any_": [name]}}}).json()
    return {flows[deployment["flow_id"]]: deployment["id"] for deployment in found}


def take(page: Page, address: str, name: str, *, scroll: int = 0) -> None:
    page.goto(address, wait_until="domcontentloaded")
    page.wait_for_timeout(LOAD_MS)
    if scroll:
        page.mouse.move(SIZE["width"] / 2, SIZE["height"] / 2)
        page.mouse.wheel(0, scroll)
        page.wait_for_timeout(500)
    page.screenshot(path=INTO / f"{name}.png")
    print(f"docs/ui/{name}.png", page.url)


def main(server: str, name: str) -> None:
    INTO.mkdir(exist_ok=True)
    ids = deployments(server, name)
    training = f"{server}/v2/deployments/deployment/{ids['multi-model-training']}/run"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox", "--disable-gpu"],
        )
        page = browser.new_page(viewport=SIZE, device_scale_factor=0.7)
        take(page, training, "training-form")
        take(page, training, "training-form-config", scroll=2000)
        take(page, f"{server}/v2/deployments/deployment/{ids['evaluate']}/run", "evaluation-form")
        take(page, f"{server}/v2/automations", "automations")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
