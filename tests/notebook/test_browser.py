"""The quickstart in real JupyterLab and Chromium: see the dashboard, turn a knob, launch, stop.

``HARMONY_SCREENSHOTS``: a folder to keep pictures in.  ``HARMONY_REQUIRE_BROWSER``: without Chromium, fail instead of
skipping.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
ROOT = Path(__file__).parents[2]
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
PATIENCE_MS = 120_000

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not CHROMIUM.exists() and not os.environ.get("HARMONY_REQUIRE_BROWSER"),
        reason=f"{CHROMIUM} is missing; HARMONY_REQUIRE_BROWSER=1 makes this a failure",
    ),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """JupyterLab on a free loopback port, with folders of its own, over a copy of the notebook."""
    work = tmp_path / "work"
    work.mkdir()
    shutil.copy(ROOT / "notebooks" / "01_quickstart.ipynb", work)
    settings = tmp_path / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    environment = {
        **os.environ,
        **{name: str(tmp_path / folder) for name, folder in folders.items()},
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=", f"--notebook-dir={work}"]
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api/status", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        assert process.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
    raise AssertionError("the server does not answer")


@pytest.fixture
def page(server: str) -> Iterator[Any]:
    """The notebook, open, with its kernel idle."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(FLAGS))
        opened = browser.new_page(viewport={"width": 1200, "height": 1500})
        opened.set_default_timeout(PATIENCE_MS)
        opened.goto(f"{server}/lab/tree/01_quickstart.ipynb?reset")
        opened.wait_for_selector("text=/\\(ipykernel\\) \\| Idle/")
        opened.keyboard.press("Control+b")  # the file browser away
        yield opened
        browser.close()


def run_up_to_the_lab(page: Any) -> None:
    """Run cells, texts among them, until the one that makes the Lab and shows it."""
    cells = page.locator(".jp-Notebook .jp-Cell")
    last = next(number for number in range(cells.count()) if "hl.Lab(" in cells.nth(number).inner_text())
    cells.first.click()
    for _ in range(last + 1):
        page.keyboard.press("Shift+Enter")


def num_backward_packs(plan: str) -> int:
    return len(re.search(r"backward=\d+\[(.*?)\]", plan)[1].split(","))


def shoot(page: Any, name: str) -> None:
    folder = os.environ.get("HARMONY_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def test_see_turn_launch_stop(page, server):
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    run_up_to_the_lab(page)

    lab = page.locator(".harmony-lab").first
    lab.locator(".harmony-table tbody tr").first.wait_for()
    lab.locator(".js-plotly-plot .main-svg").first.wait_for()
    assert lab.locator(".harmony-table input:checked").count() == 1
    assert "What binds is" in lab.locator(".harmony-header").inner_text()
    static = page.locator(".harmony-static").first
    assert static.count() == 1
    assert not static.is_visible()  # beside live widgets
    shoot(page, "dashboard")

    plan = lab.locator("textarea").first
    timeline = lab.locator(".js-plotly-plot").first
    plan_before, drawn_before = plan.input_value(), timeline.locator(".barlayer").inner_html()
    packs = lab.locator(".widget-hslider", has_text="backward packs").locator(".widget-readout")
    packs.click()
    page.keyboard.press("Control+a")
    other = 7 if num_backward_packs(plan_before) != 7 else 5  # which plan is best depends on what was measured
    page.keyboard.type(str(other))
    page.keyboard.press("Enter")
    page.wait_for_function("([area, before]) => area.value !== before", arg=[plan.element_handle(), plan_before])
    assert num_backward_packs(plan.input_value()) == other
    page.wait_for_function(
        "before => document.querySelector('.harmony-lab .js-plotly-plot .barlayer').innerHTML !== before",
        arg=drawn_before,
    )
    shoot(page, "knob")

    lab.get_by_role("button", name="back to the candidate").click()
    page.wait_for_function("([area, before]) => area.value === before", arg=[plan.element_handle(), plan_before])
    lab.locator("button", has_text="Launch").click()
    loss = lab.locator(".harmony-tile", has_text="loss")
    loss.wait_for()
    page.wait_for_function("() => /step ([3-9]|\\d\\d)/.test(document.querySelector('.harmony-lab').innerText)")
    assert float(loss.locator("b").inner_text()) < 6.5
    lab.locator("button", has_text="Stop").scroll_into_view_if_needed()
    shoot(page, "training")

    lab.locator("button", has_text="Stop").click()
    lab.locator("b", has_text="stopped").wait_for()
    assert lab.locator("button", has_text="Launch").is_enabled()
    reopen_without_the_kernel(page, server)
    assert static.is_visible()
    assert "stopped: step" in static.inner_text()
    assert plan_before in static.inner_text()
    assert "Loss:" in static.inner_html()
    static.scroll_into_view_if_needed()
    shoot(page, "reopened")
    assert problems == []


def reopen_without_the_kernel(page: Any, server: str) -> None:
    page.wait_for_function("() => document.querySelector('.harmony-static').textContent.includes('stopped: step')")
    page.keyboard.press("Escape")
    page.keyboard.press("Control+s")
    page.wait_for_selector(".jp-mod-current[data-type=document-title]:not(.jp-mod-dirty)")
    page.evaluate(
        """async () => {
            const headers = { "X-XSRFToken": document.cookie.match(/_xsrf=([^;]+)/)[1] };
            for (const { id } of await (await fetch("/api/kernels")).json())
                await fetch(`/api/kernels/${id}`, { method: "DELETE", headers });
        }"""
    )
    page.goto(f"{server}/lab/tree/01_quickstart.ipynb?reset")
    page.wait_for_selector(".harmony-static")


def test_controls_have_names_and_obey_the_keyboard(page):
    run_up_to_the_lab(page)
    lab = page.locator(".harmony-lab").first
    lab.locator(".js-plotly-plot .main-svg").first.wait_for()
    packs = lab.get_by_role("slider", name="backward packs")
    packs.wait_for()
    unnamed = lab.locator("select, textarea, input, [role=slider]").evaluate_all(
        "all => all.filter(e => e.offsetParent && !e.ariaLabel && !e.labels?.length).map(e => e.outerHTML)"
    )
    assert unnamed == []
    plan = lab.locator("textarea").first
    before = plan.input_value()
    packs.focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("([area, before]) => area.value !== before", arg=[plan.element_handle(), before])
    assert num_backward_packs(plan.input_value()) == num_backward_packs(before) - 1
    lab.locator(".harmony-table input").first.focus()
    page.keyboard.press("ArrowDown")
    lab.locator(".harmony-table tbody tr").nth(1).locator("input:checked").wait_for(state="attached")
    lab.locator("text=against candidate 1").wait_for()
