"""The quickstart in real JupyterLab and Chromium: one page, on which one test goes on where the one before left off.

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
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import expect

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
PATIENCE_MS = 120_000  # the first search on a machine makes machine code
LAYOUT_MS = 5_000  # until a page stands still
TABS = ("Links", "Swaps", "Candidates", "Compare", "What if", "Layers")
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
CONTROLS = "button, select, textarea, input, [role=slider], [role=tab], [role=img]"
UNNAMED = """all => all
    .filter(e => e.checkVisibility() && !e.ariaLabel && !e.labels?.length && !e.textContent.trim() && !e.title)
    .map(e => e.outerHTML.slice(0, 200))"""
UNREACHABLE = "all => all.filter(e => e.tabIndex < 0).map(e => e.outerHTML.slice(0, 200))"
CUT_TITLES = """plot => [...plot.querySelectorAll(".gtitle, .annotation text")]
    .filter(e => e.getBoundingClientRect().right > plot.getBoundingClientRect().right + 1).map(e => e.textContent)"""
PLAN = "pattern => new RegExp(pattern).test(document.querySelector('.harmony-lab textarea').value)"
FIGURE = """title => [...document.querySelectorAll('.harmony-lab .gtitle')]
    .some(e => e.textContent.includes(title) && e.checkVisibility())"""
TIME_RANGES = """plot => Object.keys(plot._fullLayout).filter(key => /^xaxis\\d*$/.test(key))
    .map(key => plot._fullLayout[key].range)"""
OVERLAPPING = """plot => {
    const boxes = [...plot.querySelectorAll(".xtick text, .textpoint text")].map(e => e.getBoundingClientRect());
    const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
    return boxes.filter((a, i) => boxes.some((b, j) => j > i && meet(a, b))).length;
}"""
LAST_POINT = """plot => {
    const trace = plot._fullData.find(each => each.customdata), { _offset: left } = plot._fullLayout.xaxis;
    const box = plot.getBoundingClientRect(), { xaxis, yaxis } = plot._fullLayout, last = trace.x.length - 1;
    return [box.left + xaxis.l2p(trace.x[last]) + left, box.top + yaxis.l2p(trace.y[last]) + yaxis._offset];
}"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not CHROMIUM.exists() and not os.environ.get("HARMONY_REQUIRE_BROWSER"),
        reason=f"{CHROMIUM} is missing; HARMONY_REQUIRE_BROWSER=1 makes this a failure",
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JupyterLab on a free loopback port, with folders of its own, over a copy of the notebook."""
    tmp_path = tmp_path_factory.mktemp("jupyter")
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
    command += ["--LabApp.expose_app_in_browser=True"]  # to change the theme
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


@dataclass
class Shown:
    """The notebook's page, the Lab's dashboard on it, and the errors that pages have met."""

    page: Any
    server: str
    problems: list[str] = field(default_factory=list)
    best: str = ""  # the best plan's text, once it is known

    @property
    def lab(self) -> Any:
        return self.page.locator(".harmony-lab").first

    @property
    def plan(self) -> str:
        return self.lab.locator("textarea").first.input_value()

    @property
    def static(self) -> Any:
        """The form for pages without a kernel, hidden beside live widgets."""
        return self.page.locator(".harmony-static").first

    def static_tells(self, words: str) -> None:
        self.page.wait_for_function(
            "words => document.querySelector('.harmony-static')?.textContent.includes(words)", arg=words
        )

    def open(self) -> None:
        """Load the notebook."""
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.goto(f"{self.server}/lab/tree/01_quickstart.ipynb?reset")
        self.page.wait_for_selector("text=/\\(ipykernel\\) \\| Idle/")
        self.page.keyboard.press("Control+b")  # the file browser away

    def use_theme(self, name: str) -> None:
        self.page.evaluate(
            "name => window.jupyterapp.commands.execute('apputils:change-theme', { theme: `JupyterLab ${name}` })", name
        )
        self.page.wait_for_function("name => document.body.dataset.jpThemeName === `JupyterLab ${name}`", arg=name)

    def button(self, name: str) -> Any:
        return self.lab.locator("button", has_text=re.compile(rf"^\s*{name}\s*$"))  # icons count as part of a name

    def open_tab(self, name: str) -> None:
        tab = self.lab.get_by_role("tab", name=name, exact=True)
        self.insist(tab.click, "tab => tab.ariaSelected === 'true'", tab.element_handle())

    def insist(self, act: Callable[[], object], condition: str, arg: Any) -> None:
        """Act until the page's condition holds: JupyterLab lays cells out as they come into view, and what is done
        meanwhile may arrive beside its target.
        """
        for _ in range(5):
            act()
            try:
                self.page.wait_for_function(condition, arg=arg, timeout=LAYOUT_MS)
                return
            except PlaywrightError:
                continue
        raise AssertionError(f"done five times, without {condition}")

    def comes_to(self, look: Callable[[], object], wanted: object) -> None:
        """Wait until the page looks so."""
        for _ in range(20):
            if look() == wanted:
                return
            self.page.wait_for_timeout(LAYOUT_MS / 20)
        assert look() == wanted

    def plan_becomes(self, pattern: str) -> None:
        """Wait for a plan whose text matches."""
        self.page.wait_for_function(PLAN, arg=pattern)

    def type_into(self, control: Any, text: str) -> None:
        control.fill(text)
        control.press("Enter")

    def slide(self, name: str, value: int) -> None:
        slider = self.lab.locator(".widget-hslider", has=self.page.get_by_role("slider", name=name, exact=True))
        self.type_into(slider.locator(".widget-readout"), str(value))

    def run(self, code: str) -> None:
        """Have the kernel run it, in no cell."""
        self.page.evaluate(
            "code => window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel"
            ".requestExecute({ code }).done",
            code,
        )

    def back(self) -> None:
        """To the candidate's plan, whatever was turned."""
        self.lab.locator(".harmony-table tbody tr").first.click()
        self.lab.locator(".harmony-table tbody tr").first.locator("input:checked").wait_for(state="attached")
        self.button("back to the candidate").click()
        self.plan_becomes(f"^{re.escape(self.best)}$")

    def shoot(self, name: str) -> None:
        folder = os.environ.get("HARMONY_SCREENSHOTS")
        if folder:
            before = self.page.viewport_size
            self.page.set_viewport_size({**before, "height": 4000})
            self.page.wait_for_timeout(1500)
            self.lab.screenshot(path=str(Path(folder) / f"{name}.png"))
            self.page.set_viewport_size(before)


@pytest.fixture(scope="module")
def shown(server: str) -> Iterator[Shown]:
    """The notebook, run up to the Lab, which is profiled, searched and drawn."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(FLAGS))
        expect.set_options(timeout=PATIENCE_MS)
        page = browser.new_context(viewport={"width": 1200, "height": 2400}).new_page()
        made = Shown(page, server)
        made.open()
        run_up_to_the_lab(page)
        made.lab.locator(".harmony-table tbody tr").first.wait_for()
        made.lab.locator(".js-plotly-plot .main-svg").first.wait_for()
        made.best = made.plan
        yield made
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


def test_the_dashboard_appears_with_the_best_plan(shown):
    expect(shown.lab.locator(".harmony-table input:checked")).to_have_count(1)
    expect(shown.lab.locator(".harmony-header")).to_contain_text("What binds is")
    expect(shown.static).to_have_count(1)
    expect(shown.static).to_be_hidden()  # beside live widgets
    expect(shown.lab.locator(".js-plotly-plot").first).to_contain_text("critical path")
    expect(shown.lab.locator(".modebar-btn")).not_to_have_count(0)
    expect(shown.lab.locator(".modebar-btn[data-title*=Share]")).to_have_count(0)  # it would upload the figure
    shown.lab.locator(".harmony-baseline", has_text="zero-infinity order").wait_for()
    shown.shoot("dashboard")


def test_controls_have_names_and_obey_the_keyboard(shown):
    packs = shown.lab.get_by_role("slider", name="backward packs")
    packs.wait_for()
    for tab in (*TABS, "Timeline"):
        shown.open_tab(tab)
        shown.comes_to(lambda: shown.lab.locator(CONTROLS).evaluate_all(UNNAMED), [])
        shown.comes_to(lambda: shown.lab.locator("[role=slider], select, input").evaluate_all(UNREACHABLE), [])
    expect(shown.lab.locator("[title=null]")).to_have_count(0)
    expect(shown.lab.locator(".widget-label[title^='packs whose weights are fetched']")).to_have_count(1)
    before = num_backward_packs(shown.plan)
    packs.focus()
    shown.page.keyboard.press("ArrowLeft")
    shown.page.wait_for_function(
        "([area, before]) => area.value.match(/backward=\\d+\\[(.*?)\\]/)[1].split(',').length === before - 1",
        arg=[shown.lab.locator("textarea").first.element_handle(), before],
    )
    shown.lab.locator(".harmony-table input").first.focus()
    shown.page.keyboard.press("ArrowDown")
    shown.lab.locator(".harmony-table tbody tr").nth(1).locator("input:checked").wait_for(state="attached")
    shown.lab.locator("text=against candidate 1").wait_for()


def test_every_kind_of_knob_changes_the_plan_and_the_pictures(shown):
    shown.back()
    drawn = shown.lab.locator(".js-plotly-plot .barlayer").first.inner_html()
    other = 7 if num_backward_packs(shown.plan) != 7 else 5  # which plan is best depends on what was measured
    shown.slide("backward packs", other)
    shown.page.wait_for_function(
        "before => document.querySelector('.harmony-lab .js-plotly-plot .barlayer').innerHTML !== before", arg=drawn
    )
    shown.plan_becomes(rf"backward=\d+\[([^,]*,){{{other - 1}}}[^,]*\] ")
    mode = "pipeline parallel" if shown.plan.startswith("dp") else "data parallel"
    shown.button(mode).click()
    shown.plan_becomes("^pp" if mode.startswith("pipeline") else "^dp")
    shown.lab.locator(".widget-checkbox", has_text="between devices directly").locator("input").click()
    shown.plan_becomes("peer=off")
    shown.type_into(shown.lab.get_by_label("order of devices"), "1, 0")
    shown.plan_becomes("devices=1,0")
    shown.type_into(shown.lab.get_by_label("minibatch", exact=True), "12")
    shown.plan_becomes("minibatch=12")
    shown.slide("packs fetched ahead", 0)
    shown.plan_becomes("prefetch=0")
    size = shown.lab.get_by_role("slider", name="backward microbatch")
    shown.insist(lambda: size.press("Home"), PLAN, r"backward=1\[")
    last = "e => e.ariaValueNow === e.ariaValueMax && e.ariaValueMax !== '0.0'"
    shown.insist(lambda: size.press("End"), last, size.element_handle())
    shown.plan_becomes(r"backward=([2-9]|\d\d)\[")
    shown.button("bf16").click()
    shown.plan_becomes("precision=bf16")
    shown.type_into(shown.lab.get_by_label("cut backward before"), "every 3")
    shown.plan_becomes(r"backward=\d+\[0:3,3:6,6:8\]")
    shown.lab.locator(".harmony-effect", has_text="instead of").first.wait_for()
    shown.shoot("knobs")
    shown.button("undo").click()
    shown.page.wait_for_function(
        "() => !document.querySelector('.harmony-lab textarea').value.includes('[0:3,3:6,6:8]')"
    )
    shown.back()


def test_packs_stay_on_the_devices(shown):
    packs = shown.lab.locator("textarea").first
    packs.fill("dp minibatch=16 forward=2[0:3,3:6] backward=2[0:3,3:6,6:8] devices=0,1")
    packs.blur()
    shown.plan_becomes("^dp.*peer=on update=jit$")
    shown.slide("packs that stay", 1)
    shown.plan_becomes(r"resident=3:6$")
    shown.slide("kept for backward", 1)
    shown.plan_becomes(r"resident=3:6 kept=3:6$")
    shown.slide("inputs kept on device", 2)
    shown.plan_becomes(r"kept=3:6 stash=3,6$")
    shown.button("in the next step").click()
    shown.plan_becomes("update=next resident")
    shown.lab.locator(".harmony-effect", has_text="instead of updates at once").wait_for()
    shown.back()


def test_packs_are_cut_and_cuts_are_dragged(shown):
    shown.back()
    shown.type_into(shown.lab.get_by_label("cut backward before"), "2, 5")
    shown.plan_becomes(r"backward=\d+\[0:2,2:5,5:8\]")
    row = shown.lab.get_by_role("group", name="backward packs")
    row.locator("[data-at='3']").click()
    shown.plan_becomes(r"backward=\d+\[0:2,2:3,3:5,5:8\]")
    box = row.bounding_box()
    y = box["y"] + box["height"] / 2
    shown.page.mouse.move(box["x"] + box["width"] * 5 / 8, y)
    shown.page.mouse.down()
    shown.page.mouse.move(box["x"] + box["width"] * 6 / 8, y, steps=5)
    shown.page.mouse.up()
    shown.plan_becomes(r"backward=\d+\[0:2,2:3,3:6,6:8\]")
    row.locator("[data-at='2']").focus()
    shown.page.keyboard.press("Shift+ArrowLeft")
    shown.plan_becomes(r"backward=\d+\[0:1,1:3,3:6,6:8\]")
    shown.page.keyboard.press("Enter")  # the cut that was moved has the focus still
    shown.plan_becomes(r"backward=\d+\[0:3,3:6,6:8\]")
    shown.back()


def test_the_table_sorts_and_still_chooses_the_right_plan(shown):
    shown.lab.get_by_role("button", name="swapped").click()
    shown.lab.get_by_role("button", name="swapped").click()
    plans = shown.lab.locator(".harmony-table tbody tr:not(.harmony-baseline)")
    first, swapped = plans.first, plans.locator("td:nth-child(9)").all_inner_texts()
    sizes = [float(text.split()[0]) * 2.0 ** (10 * "KMG".index(text.split()[1][0])) for text in swapped]
    assert sizes == sorted(sizes, reverse=True)
    rank = first.locator("td").nth(1).inner_text()
    first.click()
    shown.lab.locator(f"text=against candidate {rank}").wait_for()
    shown.lab.get_by_role("button", name="rank").click()
    shown.back()


def test_baselines_are_seen_below_a_few_candidates_and_all_candidates_on_demand(shown):
    plans = shown.lab.locator(".harmony-table tbody tr:not(.harmony-baseline)")
    more = shown.lab.locator(".harmony-table tfoot button")
    expect(more).to_contain_text("all ")
    count = int(re.search(r"\d+", more.inner_text())[0])
    more.click()
    expect(plans).to_have_count(count)
    assert count > 10
    more.click()

    def is_short() -> bool:
        rows = [row.split("\t", 2)[2] for row in plans.all_inner_texts()]  # without radio button and rank
        return 0 < len(rows) <= 11 and len(rows) - len({*rows}) <= 1  # the chosen one is there in any case

    shown.comes_to(is_short, True)


def test_timeline_and_memory_are_zoomed_together(shown):
    shown.open_tab("Timeline")
    plots = shown.lab.locator(".widget-tab .js-plotly-plot").locator("visible=true")
    plots.nth(1).locator(".main-svg").first.wait_for()
    (whole,) = plots.first.evaluate(TIME_RANGES)

    def drag() -> None:
        plots.first.scroll_into_view_if_needed()
        box = plots.first.locator(".nsewdrag").first.bounding_box()
        y = box["y"] + box["height"] / 2
        shown.page.mouse.move(box["x"] + box["width"] * 0.3, y)
        shown.page.mouse.down()
        shown.page.mouse.move(box["x"] + box["width"] * 0.6, y, steps=5)
        shown.page.mouse.up()

    changed = "([plot, whole]) => plot._fullLayout.xaxis.range[1] < whole[1]"
    shown.insist(drag, changed, [plots.first.element_handle(), whole])
    (zoomed,) = plots.first.evaluate(TIME_RANGES)
    shown.comes_to(lambda: plots.nth(1).evaluate(TIME_RANGES), [zoomed, zoomed])  # a panel for each device
    plots.first.locator(".nsewdrag").first.dblclick()
    shown.comes_to(lambda: plots.nth(1).evaluate(TIME_RANGES), [whole, whole])


def test_a_plan_is_picked_in_the_scatter(shown):
    shown.open_tab("Candidates")
    plot = shown.lab.locator(".js-plotly-plot", has=shown.page.locator("text=lower left is better")).first
    plot.locator(".scatterlayer .point").first.wait_for()
    place = plot.evaluate(LAST_POINT)

    def hover() -> None:
        nonlocal place
        shown.open_tab("Candidates")
        shown.page.mouse.move(0, 0)
        plot.scroll_into_view_if_needed()
        place = plot.evaluate(LAST_POINT)
        shown.page.mouse.move(*place)

    shown.insist(hover, "plot => plot._hoverdata?.[0]?.customdata != null", plot.element_handle())
    shown.page.mouse.click(*place)
    rank = plot.evaluate("plot => plot._hoverdata[0].customdata")  # of points in one place, one is hovered over
    shown.lab.locator(f"text=against candidate {rank}").wait_for()
    shown.back()


def test_two_plans_are_compared(shown):
    shown.open_tab("Compare")
    shown.lab.get_by_label("A", exact=True).select_option("candidate 0")
    shown.lab.get_by_label("B", exact=True).select_option("candidate 2")
    table = shown.lab.locator(".harmony-compared")
    table.locator("text=B: candidate 2").wait_for()
    expect(table).to_contain_text("critical path")
    shown.page.wait_for_function(FIGURE, arg="candidate 2")
    shown.shoot("compare")


def test_another_machine_is_asked_about(shown):
    shown.open_tab("What if")
    shown.type_into(shown.lab.get_by_label("memory, typed"), "16MiB")
    shown.lab.locator("text=The best plan there").wait_for()
    expect(shown.button("use that plan here")).to_be_enabled()
    shown.shoot("what_if")
    shown.button("reset").click()
    shown.lab.locator("text=The best plan there").wait_for(state="detached")
    shown.open_tab("Timeline")


def test_mistakes_are_explained_where_they_were_made(shown):
    shown.back()
    shown.lab.locator("textarea").first.fill("pp minibatch=16")
    shown.lab.locator("textarea").first.blur()
    error = shown.lab.locator(".harmony-error", has_text="backward= is missing")
    error.wait_for()
    shown.back()
    shown.type_into(shown.lab.get_by_label("data", exact=True), "lodaer")
    shown.button("Launch").click()
    shown.lab.locator(".harmony-error", has_text="there is no 'lodaer'").wait_for()
    shown.type_into(shown.lab.get_by_label("data", exact=True), "batches")
    shown.slide("backward packs", 1)
    shown.lab.locator(".harmony-error", has_text="does not fit").wait_for()
    expect(shown.button("Launch")).to_be_disabled()
    expect(shown.button("Launch")).to_have_attribute("title", re.compile("cannot be launched"))
    shown.back()


def test_a_page_that_is_loaded_later_shows_the_live_dashboard_too(shown):
    shown.back()
    shown.static_tells(shown.best)
    save(shown.page)
    later = Shown(shown.page.context.new_page(), shown.server, shown.problems, shown.best)
    later.page.set_viewport_size(shown.page.viewport_size)
    later.open()
    later.lab.locator(".js-plotly-plot .main-svg").first.wait_for()
    later.comes_to(lambda: later.plan, shown.best)
    later.slide("packs fetched ahead", 2)
    later.plan_becomes("prefetch=2")
    shown.plan_becomes("prefetch=2")  # one kernel, one Lab
    later.static_tells("prefetch=2")  # what this page would save
    expect(later.static).to_be_hidden()
    later.page.close()
    shown.page.bring_to_front()
    shown.back()


def test_a_run_that_fails_tells_why_and_another_can_be_launched(shown):
    shown.run(
        "class Gone:\n def __iter__(self):\n  yield batches[0]\n  raise OSError('the disk is gone')\ngone = Gone()"
    )
    shown.type_into(shown.lab.get_by_label("data", exact=True), "gone")
    shown.button("Launch").click()
    shown.lab.locator("b", has_text="failed").wait_for()
    expect(shown.lab.locator(".harmony-error").locator("visible=true")).to_contain_text("OSError: the disk is gone")
    expect(shown.button("Launch")).to_be_enabled()
    shown.shoot("failed")
    shown.type_into(shown.lab.get_by_label("data", exact=True), "batches")


def test_launch_pause_resume_and_stop(shown):
    launch, lab = shown.button("Launch"), shown.lab
    launch.click()
    loss = lab.locator(".harmony-tile", has_text="loss")
    loss.wait_for()
    shown.page.wait_for_function("() => /step ([3-9]|\\d\\d)/.test(document.querySelector('.harmony-lab').innerText)")
    assert float(loss.locator("b").inner_text()) < 6.5
    expect(launch).to_be_disabled()
    shown.button("Pause").click()
    lab.locator("b", has_text="paused").wait_for()
    shown.shoot("paused")
    shown.button("Resume").click()
    lab.locator("b", has_text="training").wait_for()
    shown.button("Stop").click()
    lab.locator("b", has_text="stopped").wait_for()
    expect(shown.button("Stop")).to_be_disabled()
    expect(shown.button("Stop")).not_to_have_class(re.compile("mod-warning"))
    expect(launch).to_be_enabled()
    shown.insist(lambda: shown.open_tab("Measured"), FIGURE, "Predicted and measured")
    shown.shoot("measured")


def test_both_themes_can_be_read(shown):
    for theme in ("Dark", "Light"):
        shown.use_theme(theme)
        for tab in (*TABS, "Timeline"):
            shown.open_tab(tab)
            shown.lab.locator(".widget-tab .js-plotly-plot .main-svg, .widget-tab .widget-hslider").locator(
                "visible=true"
            ).first.wait_for()
            shown.comes_to(lambda: shown.lab.evaluate(CONTRAST), [])
        shown.shoot(theme.lower())


@pytest.mark.parametrize("width", [620, 700])
def test_a_narrow_page_shows_everything(shown, width):
    shown.page.set_viewport_size({"width": width, "height": 2900})
    shown.open_tab("Timeline")
    for part in (".harmony-table", ".widget-tab"):
        whole = shown.lab.locator(part).first
        shown.comes_to(lambda whole=whole: whole.evaluate("e => e.scrollWidth <= e.clientWidth + 1"), True)
    shown.page.wait_for_function(
        "() => document.querySelector('.harmony-lab .main-svg').clientWidth <= document.body.clientWidth"
    )
    shown.comes_to(lambda: shown.lab.locator(".js-plotly-plot").first.evaluate(CUT_TITLES), [])
    shown.open_tab("Swaps")
    for table in shown.lab.locator(".widget-tab .js-plotly-plot").locator("visible=true").all():
        table.locator(".textpoint").first.wait_for()
        shown.comes_to(lambda table=table: table.evaluate(CUT_TITLES), [])
        shown.comes_to(lambda table=table: table.evaluate(OVERLAPPING), 0)
    shown.open_tab("Timeline")
    shown.shoot(f"narrow_{width}")
    shown.page.set_viewport_size({"width": 1200, "height": 2400})


def test_a_saved_notebook_shows_the_last_state_without_its_kernel(shown):
    plan = shown.plan
    shown.static_tells("stopped: step")
    save(shown.page)
    shown.page.evaluate(
        """async () => {
            const headers = { "X-XSRFToken": document.cookie.match(/_xsrf=([^;]+)/)[1] };
            for (const { id } of await (await fetch("/api/kernels")).json())
                await fetch(`/api/kernels/${id}`, { method: "DELETE", headers });
        }"""
    )
    shown.open()
    shown.page.wait_for_selector(".harmony-static")
    expect(shown.static).to_be_visible()
    expect(shown.static).to_contain_text("stopped: step")
    expect(shown.static).to_contain_text(plan)
    for picture in ("Predicted iteration", "Loss:"):
        image = shown.static.locator(f"img[alt^='{picture}']").first
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0, picture
    shown.comes_to(lambda: shown.static.evaluate(CONTRAST), [])
    assert shown.problems == []


def save(page: Any) -> None:
    """Save, and again where the notebook changed meanwhile: static forms follow what was done last."""
    page.locator(".jp-Notebook .jp-InputPrompt").first.click()  # the focus away from controls
    for _ in range(5):
        page.keyboard.press("Control+s")
        try:
            page.wait_for_selector(".jp-mod-current[data-type=document-title]:not(.jp-mod-dirty)", timeout=5000)
            return
        except PlaywrightError:
            continue
    raise AssertionError("the notebook cannot be saved")
