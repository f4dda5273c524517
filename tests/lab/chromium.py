"""Chromium, driven by Playwright, for the tests that look at pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Locator, Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NONE_HERE = "no Chromium here (Debian: apt-get install chromium)"


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def watched(browser: Browser, said: list[str], **options: object) -> Page:
    """An empty page in a context of its own; ``said`` gets all that its console, its errors and its dialogs say."""
    page = browser.new_context(**options).new_page()  # type: ignore[arg-type]
    page.set_default_timeout(60_000)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    return page


def follow(link: Locator, **options: object) -> None:
    """Clicks, and waits for the page that this leads to: after a click alone the old one may still be there."""
    with link.page.expect_navigation():
        link.click(**options)  # type: ignore[arg-type]
