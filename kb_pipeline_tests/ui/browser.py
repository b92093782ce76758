"""What a person does in the web UI, as clicks. Waits for what is shown, never for time."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")
# Alone, without a graphics card, and without a word to anybody outside.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--metrics-recording-only",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
LOCATION = "kb_pipeline.orchestration.definitions"
PATIENCE_MS = 30_000
WIDE = {"width": 1500, "height": 950}


class Ui:
    """One tab. ``elsewhere``: addresses that the pages asked for and that are not this server's."""

    def __init__(self, page: Any, url: str, pictures: Path) -> None:
        self.page = page
        self.elsewhere: list[str] = []
        self._url, self._pictures = url, pictures
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", lambda r: None if r.url.startswith((url, "data:", "blob:")) else self.elsewhere.append(r.url))

    def open(self, path: str, *shows: str) -> None:
        self.page.goto(self._url + path)
        self.sees(*shows)

    def job(self, name: str, *shows: str) -> None:
        self.open(f"/locations/__repository__@{LOCATION}/jobs/{name}", *shows)

    def sees(self, *texts: str) -> None:
        """Each of them, as the whole text of something that is visible."""
        for text in texts:
            self.page.get_by_text(text, exact=True).locator("visible=true").first.wait_for()

    def shows(self, pattern: str) -> str:
        """The visible text that matches."""
        found = self.page.get_by_text(re.compile(pattern)).locator("visible=true").first
        found.wait_for()
        return str(found.inner_text())

    def picture(self, name: str, **options: Any) -> Path:
        self._pictures.mkdir(parents=True, exist_ok=True)
        path = self._pictures / f"{name}.png"
        self.page.screenshot(path=path, animations="disabled", **options)
        return path

    def materialise(self, *spaces: str, config: str = "") -> None:
        """The dialog behind "Materialize", of the page that is open: for some spaces, or for all."""
        self.page.get_by_role("button", name=re.compile("Materialize")).first.click()
        dialog = self.page.get_by_role("dialog").first
        if not spaces:
            dialog.get_by_role("button", name="All", exact=True).click()
        else:
            dialog.get_by_text("Select a partition").click()
            for space in spaces:
                # In the list that opens, not in the page behind it, which may name the space in a link.
                choice = self.page.locator(".bp5-portal label, .bp5-portal li, .bp5-portal a").filter(has_text=space)
                choice.locator("visible=true").last.click()
            self.page.keyboard.press("Escape")
        if config:
            self._configure(dialog, config)
        self.page.get_by_role("button", name=re.compile("Launch (1 run|backfill)")).click()

    def _configure(self, dialog: Any, config: str) -> None:
        dialog.get_by_text("Config", exact=True).click()
        dialog.get_by_role("button", name="Add config").click()
        editor = self.page.locator(".CodeMirror").last
        editor.wait_for()
        editor.evaluate("(e, text) => e.CodeMirror.setValue(text)", config)
        self.page.get_by_role("button", name="Save config").click()

    def follow(self) -> None:
        """To the run that was launched just now, until it has succeeded."""
        self.shows("^Launched run")
        self.page.get_by_text("View", exact=True).locator("visible=true").last.click()
        self.page.wait_for_url("**/runs/**")
        ended = self.shows("^(Success|Failure|Canceled)$")
        assert ended == "Success", self.page.inner_text("body")


@contextmanager
def browser(program: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield made
        finally:
            made.close()
