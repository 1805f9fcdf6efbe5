"""The page in a real browser: nothing asked of a network, nothing run that a model wrote, filters and search that work.

Skipped where there is no Chromium or no playwright.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas
import pytest

from podium.records import StepMetrics
from podium.runs.recording import RunFolder
from podium.runs.report import live, page, write_report
from podium.runs.report.live import PageServer
from podium.runs.run import Run
from tests.images.test_thumbnails import prompt, tables
from tests.images.tiny import picture

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

READY = 20_000
"""Milliseconds; a busy machine takes a while."""

HOSTILE = (
    "</script><script>window.hit = 1</script>",
    "<img src=x onerror=window.hit=1>",
    "<svg onload=window.hit=1>",
    "<svg><script>window.hit=1</script></svg>",
    "<iframe src='javascript:parent.hit=1'></iframe>",
    "<a href='javascript:window.hit=1'>click</a>",
    "javascript:window.hit=1",
    "data:text/html,<script>window.hit=1</script>",
    "<link rel=stylesheet href=https://example.org/x.css>",
    "<style>@import url(https://example.org/x.css); * { display: none }</style>",
    "<meta http-equiv=refresh content='0;url=https://example.org'>",
    "<base href=https://example.org>",
    "<form action=https://example.org><button>x</button></form>",
    "<object data=https://example.org></object>",
    "<embed src=https://example.org>",
    "<video src=https://example.org/x.mp4 autoplay onerror=window.hit=1></video>",
    "<details open ontoggle=window.hit=1>",
    "<input autofocus onfocus=window.hit=1>",
    "<body onload=window.hit=1>",
    "<math><mtext></p><img src=x onerror=window.hit=1></mtext></math>",
    "<noscript><p title='</noscript><img src=x onerror=window.hit=1>'>",
    "<template><script>window.hit=1</script></template>",
    "<!--<script>window.hit=1</script>-->",
    "]]><script>window.hit=1</script>",
    "\\u003cscript\\u003ewindow.hit=1\\u003c/script\\u003e",
    "&lt;script&gt;window.hit=1&lt;/script&gt;",
    "{{ 7 * 7 }} ${7 * 7} #{7 * 7} <%= 7 * 7 %> {% raw %}",
    "'); window.hit = 1; ('",
    '"; window.hit = 1; "',
    "`${window.hit = 1}`",
    "line\u2028separator\u2029paragraph",
    "\u202egnitupmoc\u202c \u2066isolated\u2069 \u200fright",
    "\x1b[2J\x1b[31mred\x1b[0m \x1b]8;;https://example.org\x07link\x1b]8;;\x07 \x1b]52;c;aGk=\x07",
    "nul\x00bell\x07backspace\x08delete\x7f c1\x9b31m",
    "Z\u0351\u036b\u0343\u036a" * 200,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \ufeff \ufffd \U0010ffff",
    '=HYPERLINK("https://example.org","x")',
    "constructor __proto__ toString hasOwnProperty",
    "",
    "w" * 100_000,
)


@dataclass
class Opened:
    """A page and everything it did that a report must not do."""

    page: Any
    requests: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def quiet(self) -> bool:
        """No request but for the page itself, nothing in the console, no dialog, nothing run."""
        assert self.requests[1:] == []
        assert self.said == []
        assert self.dialogs == []
        assert self.page.evaluate("window.hit") is None
        return True

    def told(self) -> str:
        return self.page.inner_text(".told")

    def tells(self, start: str) -> None:
        """Wait until it does. (Playwright's functions to wait for would need `eval`, which the page forbids.)"""
        playwright.expect(self.page.locator(".told")).to_have_text(re.compile(start), timeout=READY)

    def live(self, text: str) -> None:
        playwright.expect(self.page.locator("#live")).to_have_text(text, timeout=READY)

    def texts(self) -> list[str]:
        return self.page.locator(".completion .text").all_text_contents()

    def rewards(self) -> list[float]:
        return [float(text) for text in self.page.locator(".completion .top:has(.push) b").all_text_contents()]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def visit(browser) -> Iterator[Callable[..., Opened]]:
    contexts = []

    def go(address: str | Path, **options: Any) -> Opened:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        opened = Opened(context.new_page())
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.on("requestfailed", lambda request: opened.failed.append(request.url))
        opened.page.on("console", lambda message: opened.said.append(f"{message.type}: {message.text}"))
        opened.page.on("pageerror", lambda error: opened.said.append(str(error)))
        opened.page.on("dialog", lambda dialog: (opened.dialogs.append(dialog.message), dialog.dismiss()))
        opened.page.goto(address.as_uri() if isinstance(address, Path) else address)
        opened.page.wait_for_selector("html[data-ready]", timeout=READY)
        return opened

    yield go
    for context in contexts:
        context.close()


@pytest.fixture
def report(run_folder, tmp_path) -> Callable[..., Path]:
    def make(*folders: Path, **given: Any) -> Path:
        return write_report([Run.load(each) for each in folders or [run_folder(**given)]], tmp_path / "report.html")

    return make


@pytest.fixture(scope="module")
def sums(visit, make_folder, tmp_path_factory) -> Opened:
    """A page of 20 steps, opened once."""
    folder = make_folder(tmp_path_factory.mktemp("runs"), num_steps=20)
    return visit(write_report([Run.load(folder)], folder / "report.html"))


@pytest.fixture(scope="module")
def uncharted(visit, make_folder, tmp_path_factory) -> Opened:
    """A page of one step without Plotly, whose completions are formulas in a spreadsheet."""
    texts = ("=1+1", '+x"', "-2", "@sum", "\t=1", "plain")
    folder = make_folder(tmp_path_factory.mktemp("runs"), num_steps=1, texts=texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "_plotly", lambda: ("", "", []))
        return visit(write_report([Run.load(folder)], folder / "report.html"))


@pytest.fixture
def opened(sums) -> Opened:
    """The same page as it was when it opened."""
    sums.page.click("text=By step")
    sums.page.locator("[aria-label=Step]").fill("19")
    sums.page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
    return sums


def walk(opened: Opened) -> None:
    """Down the whole page, so that everything that waits to be seen is drawn."""
    for _ in range(100):
        opened.page.mouse.wheel(0, 800)
        opened.page.wait_for_timeout(30)
        if opened.page.evaluate("scrollY + innerHeight >= document.body.scrollHeight - 2"):
            return


# ---- stages ----


@pytest.mark.slow
def test_a_line_with_its_name_stands_where_a_stage_begins(visit, make_folder, tmp_path):
    run = tmp_path / "run"
    entries = [{"name": name, "folder": f"0-{name}", "type": "grpo"} for name in ("form", "<b>right</b>")]
    for entry in entries:
        entry["folder"] = entry["folder"].replace("/", "").replace("<", "").replace(">", "")
        make_folder(run, entry["folder"], num_steps=12)
    (run / "stages.json").write_text(json.dumps({"stages": entries}))
    opened = visit(write_report([Run.load(run)], tmp_path / "report.html"))
    opened.page.wait_for_selector("[data-chart=reward] .annotation-text", timeout=READY)
    names = opened.page.locator("[data-chart=reward] .annotation-text").all_text_contents()
    assert names == ["form", "<b>right</b>"]
    layout = "document.querySelector('[data-chart=reward] .plot').layout"
    assert opened.page.evaluate(f"{layout}.shapes.map((shape) => shape.x0)") == [12.5]
    assert opened.page.evaluate(f"{layout}.xaxis.range[1] > 24")
    assert opened.quiet()


# ---- without Plotly ----


def test_a_page_without_plotly_is_whole_but_for_its_curves(uncharted):
    opened = uncharted
    assert opened.page.locator(".uncharted").inner_text().endswith("pip install 'podium[report]'")
    assert opened.page.locator(".chart h3").count() > 3
    assert opened.page.locator(".chart .plot:visible").count() == 0
    assert opened.page.locator(".completion").count() > 0
    opened.page.click("#theme")
    opened.page.evaluate("dispatchEvent(new Event('beforeprint')), dispatchEvent(new Event('afterprint'))")
    assert opened.quiet()


# ---- safety ----


def test_hostile_completions_are_text(visit, run_folder, report):
    folder = run_folder(num_steps=3, texts=HOSTILE)
    evil = HOSTILE[0] + HOSTILE[1]
    metrics = (
        (folder / "metrics.jsonl").read_text().replace("rewards/format/mean", "rewards/<img src=x onerror=hit=1>/mean")
    )
    (folder / "metrics.jsonl").write_text(metrics)
    finding = '{"code": "M1", "severity": "error", "what": "W", "why": "W", "fix": "W", "step": 3}\n'
    (folder / "findings.jsonl").write_text(finding.replace("W", evil.replace('"', "'")))
    (folder / "config.yaml").write_text(f"model: {evil!r}\n")
    opened = visit(report(folder))
    walk(opened)
    for filtered in ("best", "worst", "cut_off", "duplicates", "disagree", "all"):
        opened.page.click(f"[data-filter={filtered}]")
        opened.page.wait_for_timeout(50)
    opened.page.fill("input[type=search]", "<script>")
    opened.page.wait_for_timeout(400)
    assert "<mark>" not in "".join(opened.texts())
    assert opened.page.locator(".completion mark").count() > 0
    assert opened.page.locator("main script, main img, main iframe, main a:not([href^='#'])").count() == 0
    assert opened.quiet()


@pytest.mark.slow
def test_an_episode_is_a_tree_of_its_branches_and_its_texts_are_text(visit, run_folder, tmp_path):
    folder = run_folder(num_steps=1)
    [path] = (folder / "rollouts").glob("*.parquet")
    rows = pandas.read_parquet(path)
    given = [{"role": evil, "name": evil, "content": f"{evil}\x1b[31m"} for evil in HOSTILE[::4]]
    turn = {"start": 0, "stop": 3, "message": {"content": HOSTILE[0]}, "replies": given}
    first = {"of": 0, "messages": 0, "answers": 0, "shared": 0, "tokens": 5, "prompt": given, "turns": [turn]}
    other = {**first, "of": 1, "messages": len(given) + 1, "answers": 1, "scored": True}
    trees = [json.dumps([{**first, "scored": False}, other]), *[None] * (len(rows) - 1)]
    failed, log = ([text, *[None] * (len(rows) - 1)] for text in (f"raised {HOSTILE[1]}", "\n".join(HOSTILE)))
    rows.assign(branches=trees, program_failed=failed, program_log=log, trained=True).to_parquet(path)
    opened = visit(write_report([Run.load(folder)], tmp_path / "report.html"))
    card = opened.page.locator("[data-row='0']")
    heads = card.locator(".branch").all_text_contents()
    assert [head.split(":")[0] for head in heads[:2]] == ["branch 1", "branch 1 goes on"]
    assert heads[2].startswith(f"branch 2, from branch 1 behind answer 1, {HOSTILE[0]}: 3 tokens drawn")
    assert card.locator(".in1").count() == 2 * len(given) + len(given) + 3
    top = card.locator(".top").all_text_contents()[-1]
    assert top.endswith(f"trained on2 branches, {rows['num_tokens'][0]} tokens")
    card.locator("summary").click()
    assert card.locator(".failed summary").inner_text() == f"The program raised {HOSTILE[1]}"
    assert card.locator(".failed .text").inner_text().startswith("\n".join(HOSTILE[:30]))
    assert "\u241b[31m" in card.locator(".text").first.inner_text()
    assert opened.page.locator(".branch").count() == 3
    opened.page.fill("input[type=search]", HOSTILE[4])  # of a branch alone
    opened.tells("1 of 64 ")
    assert opened.page.locator("main script, main img, main iframe, main a:not([href^='#'])").count() == 0
    assert opened.quiet()


@pytest.mark.slow
def test_control_characters_are_seen(visit, report):
    opened = visit(report(num_steps=1, texts=("a\x00b\u202ec\x1bd\u2028e",)))
    assert opened.texts()[0] == "a\u2400b<U+202E>c\u241bd<U+2028>e"


# ---- what one sees ----


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.defect("H1", "before and after: every mark inside its picture")
@pytest.mark.defect("F8", "before and after: marks and intervals")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_marks_of_before_and_after_are_seen(visit, report, width, now):
    opened = visit(report(num_steps=2), viewport={"width": width, "height": 844})
    marks = opened.page.evaluate(
        """() => [...document.querySelectorAll("svg.ab")].map((svg) => {
            const box = svg.getBoundingClientRect();
            const inside = [...svg.querySelectorAll("circle")].map((mark) => mark.getBoundingClientRect())
                .filter((m) => m.top >= box.top - 1 && m.bottom <= box.bottom + 1 && m.right <= innerWidth);
            return [inside.length, box.height];
        })"""
    )
    assert marks
    assert {count for count, _ in marks} == {2}
    now(f"{len(marks)} pictures of {marks[0][1]:.0f} px, two marks in each, {width} px wide")


@pytest.mark.slow
@pytest.mark.defect("H4", "before and after, and the navigation, at 390 px")
@pytest.mark.defect("F8", "phone")
def test_a_phone_shows_the_whole_table(visit, report, now):
    opened = visit(report(num_steps=2), viewport={"width": 390, "height": 844})
    wider = (
        "(selector) => [...document.querySelectorAll(selector)].filter((x) => x.scrollWidth > x.clientWidth + 1).length"
    )
    assert [opened.page.evaluate(wider, part) for part in (".held", ".links", "body")] == [0, 0, 0]
    now("nothing is wider than its place")


@pytest.mark.slow
@pytest.mark.defect("F8", "eight equal completions")
def test_equal_completions_stand_there_once(visit, report, now):
    opened = visit(report(num_steps=1, texts=("the same",)))
    shown = opened.page.locator(".group").first.locator(".completion").count()
    assert shown < 8
    now(f"{shown} cards in place of 8, and a button for all")


@pytest.mark.slow
@pytest.mark.defect("F8", "print: the step of a finding, no headings without content")
def test_paper_has_steps_and_no_empty_headings(visit, report, now):
    opened = visit(report(num_steps=3))
    opened.page.emulate_media(media="print")
    there = "(part) => [...document.querySelectorAll(part)].filter((x) => x.getClientRects().length)"
    seen = f"(part) => ({there})(part).map((x) => x.innerText)"
    assert "step" in "".join(opened.page.evaluate(seen, ".finding .where button"))
    headings = opened.page.evaluate(seen, "h2")
    assert not {"Setup", "Other metrics"} & set(headings)
    now(f"headings on paper: {', '.join(headings)}")


# ---- what one can do ----


def test_curves_are_drawn(opened):
    walk(opened)
    drawn = opened.page.evaluate(
        """() => [...document.querySelectorAll("#curves .plot, #reward .plot")]
            .map((plot) => plot.querySelectorAll(".scatterlayer path.js-line").length)"""
    )
    assert len(drawn) >= 10
    assert all(drawn)
    assert opened.page.locator(".timeline button.warning").count() == 1
    opened.page.click(".timeline button.warning")
    assert opened.page.locator(".finding.hit").inner_text().startswith("\u25b2")
    assert opened.quiet()


def test_a_click_on_a_curve_opens_its_step(opened):
    box = opened.page.locator("#reward .plot .nsewdrag").bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.page.wait_for_selector("#reward .hoverlayer text")
    opened.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.tells("^Step (10|11): 8 prompts, 64 completions")


def test_steps_and_groups(opened):
    assert opened.told().startswith("Step 20: 8 prompts, 64 completions")
    opened.page.click("[aria-label='Step before']")
    assert opened.told().startswith("Step 19:")
    first = opened.page.locator(".group").first
    folded = first.locator(".completion").count()
    assert folded < 8, "completions that are repeated stand there once"
    first.get_by_text(f"show all 8, with {8 - folded} repeated").click()
    assert first.locator(".completion").count() == 8
    opened.page.select_option("[aria-label='Order within a group']", "reward")
    rewards = opened.rewards()[:folded]
    assert rewards == sorted(rewards, reverse=True)
    assert "<|user|>" not in opened.page.locator(".prompt").first.inner_text()
    opened.page.get_by_text("as the model sees it").first.click()
    assert "<|user|>" in opened.page.locator(".prompt").first.inner_text()
    assert opened.quiet()


def test_the_filters(opened):
    opened.page.click("[data-filter=best]")
    assert opened.told().startswith("1,280 of 1,280")
    assert set(opened.rewards()) == {3.0}
    opened.page.click("[data-filter=worst]")
    assert set(opened.rewards()) == {0.0}
    opened.page.click("[data-filter=cut_off]")
    assert opened.page.locator(".completion").count() == opened.page.locator(".completion .badge.cut").count() > 0
    opened.page.click("[data-filter=duplicates]")
    first = opened.texts()
    assert first[0] == first[1]
    opened.page.click("[data-filter=disagree]")
    widths = [float(text.split()[0]) for text in opened.page.locator(".badge.wide").all_text_contents()]
    assert widths == sorted(widths, reverse=True)
    assert len(widths) > 3
    assert widths[0] == 100, "one function at its highest, another at its lowest"
    opened.page.check("text=this step only")
    assert set(opened.page.locator(".completion .top .link").all_text_contents()) == {"step 20"}
    assert opened.quiet()


def test_search(opened):
    opened.page.fill("input[type=search]", "it is 7")
    opened.tells("of 1,280")
    texts = opened.texts()
    assert texts
    assert all("It is 7" in text for text in texts)
    assert opened.page.locator("mark").first.text_content() == "It is 7"
    assert opened.page.evaluate("document.activeElement.type") == "search"
    opened.page.fill("input[type=search]", "nothing has this")
    opened.tells("^0 of")
    opened.page.fill("input[type=search]", "")
    opened.tells("^Step 20")
    assert opened.quiet()


def test_a_prompt_over_time(opened):
    opened.page.click("text=By prompt")
    assert "prompts; each with its mean reward" in opened.told()
    opened.page.locator(".prompts > div").first.click()
    times = int(re.search(r"drawn (\d+) times", opened.told())[1])
    walk(opened)
    groups = opened.page.locator(".group")
    assert groups.count() == times > 1
    steps = [int(text.split()[1]) for text in opened.page.locator(".group > header > b").all_text_contents()]
    assert steps == sorted(steps)
    assert len(set(opened.page.locator(".prompt").all_text_contents())) == 1
    assert opened.quiet()


def test_no_spreadsheet_computes_a_model_s_text(uncharted, tmp_path):
    opened = uncharted
    with opened.page.expect_download() as download:
        opened.page.click("text=CSV")
    download.value.save_as(tmp_path / "c.csv")
    import csv

    rows = list(csv.DictReader((tmp_path / "c.csv").open(encoding="utf-8-sig", newline="")))
    assert len(rows) == 64
    assert [row["text"] for row in rows[:6]] == ["'=1+1", "'+x\"", "'-2", "'@sum", "'\t=1", "plain"]
    assert float(rows[0]["reward"]) >= 0


def test_the_policy_holds(opened):
    """What would run if some text did become markup. The last with this page: it stays as it is then."""
    opened.page.evaluate(
        """() => {
            const box = document.createElement("div");
            box.innerHTML = "<img src=x onerror='window.hit=1'><style>body { display: none }</style>";
            document.body.append(box);
            const script = document.createElement("script");
            script.textContent = "window.hit = 2";
            document.body.append(script);
        }"""
    )
    opened.page.wait_for_timeout(200)
    assert opened.page.evaluate("window.hit") is None
    assert opened.page.evaluate("getComputedStyle(document.body).display") == "block"
    assert opened.failed == opened.requests[1:]  # asked for and refused in the browser
    assert opened.page.evaluate("fetch('https://example.org').then(() => 'sent', () => 'refused')") == "refused"


@pytest.mark.slow
def test_two_runs(visit, run_folder, report):
    opened = visit(report(run_folder("one"), run_folder("two", num_steps=15, seed=2)))
    assert opened.page.locator(".verdict").count() == 2
    assert opened.page.locator("tr.differs").count() >= 2
    opened.page.locator(".segment button:has(.run-b)").click()
    assert opened.told().startswith("Step 15")
    opened.page.click("text=By prompt")
    opened.page.locator(".prompts > div").first.click()
    walk(opened)
    assert opened.page.locator(".group .run-a").count() > 0
    assert opened.page.locator(".group .run-b").count() > 0
    assert opened.quiet()


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("missing", ["rollouts", "metrics.jsonl"])
def test_parts_that_are_missing(visit, run_folder, report, missing):
    folder = run_folder(num_steps=3)
    shutil.rmtree(folder / missing) if missing == "rollouts" else (folder / missing).unlink()
    assert visit(report(folder)).quiet()


# ---- sizes and media ----


@pytest.mark.slow
def test_nothing_is_wider_than_a_phone(visit, report):
    opened = visit(report(), viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    walk(opened)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    for view in ("[data-filter=best]", "text=By prompt"):
        opened.page.click(view)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    for scheme, light in (("light", True), ("dark", False)):
        opened.page.emulate_media(color_scheme=scheme)
        background = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 380) is light


@pytest.mark.slow
def test_paper_is_light_and_whole(visit, report):
    opened = visit(report(), color_scheme="dark")
    opened.page.emulate_media(media="print")
    opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    widths = opened.page.evaluate(
        """() => [...document.querySelectorAll("#curves .plot")]
            .map((plot) => plot.querySelector(".main-svg")?.getBoundingClientRect().width)"""
    )
    assert set(widths) == {300}
    opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.quiet()


@pytest.mark.slow
def test_five_hundred_steps_open_quickly(visit, report):
    path = report(num_steps=500, words=60)
    begun = time.perf_counter()
    opened = visit(path)
    seconds = time.perf_counter() - begun
    print(f"{path.stat().st_size / 1e6:.1f} MB open in {seconds:.2f} s")  # noqa: T201
    assert opened.told().startswith("Step 500")
    begun = time.perf_counter()
    opened.page.fill("input[type=search]", "carry one over")
    opened.tells("of 32,000")
    assert opened.page.locator(".completion").count() < 200
    print(f"found in {time.perf_counter() - begun:.2f} s")  # noqa: T201
    assert seconds < 15  # a machine that others work on; 3 s on one at rest


# ---- live ----


@pytest.mark.slow
def test_the_live_page_follows(visit, run_folder, monkeypatch):
    monkeypatch.setattr(live, "SHARE", 1e9)
    folder, later = run_folder(num_steps=10), run_folder("later", num_steps=12)
    with PageServer([folder]) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        opened = visit(server.url)
        opened.live("live, step 10")
        assert opened.told().startswith("Step 10:")
        shutil.copy(later / "rollouts" / "rollouts-0.parquet", folder / "rollouts" / "rollouts-1.parquet")
        shutil.copy(later / "metrics.jsonl", folder / "metrics.jsonl")
        opened.live("live, step 12")
        opened.tells("^Step 12: 8 prompts, 64")
        opened.page.click("[aria-label='Step before']")
        assert opened.told().startswith("Step 11: 8 prompts, 64")
        assert opened.said == []
        server.shutdown()
    assert all(url.startswith(server.url) for url in opened.requests)
    opened.live("no answer; what was last known")


# ---- images ----


def test_images_of_prompts_are_shown_and_no_others(visit, tmp_path):
    """A thumbnail is decoded where it comes into sight; an image from anywhere else is blocked."""
    folder = RunFolder(tmp_path / "run")
    folder.begin(resumed_step=None)
    prompts = [prompt(number, picture(number, 30, 40), picture(99)) for number in range(30)]
    folder.add_rollouts(tables(1, *prompts))
    opened = visit(write_report([Run.load(tmp_path / "run")], tmp_path / "page.html"))
    images = opened.page.locator(".group .pictures img")
    assert opened.page.locator(".group").count() < 30  # those that came into sight
    assert images.count() == 2 * opened.page.locator(".group").count()
    images.first.scroll_into_view_if_needed()
    sizes = "Promise.all([...document.querySelectorAll('.pictures img')].slice(0, 2).map((image) => image.decode().then(() => [image.naturalWidth, image.naturalHeight])))"  # noqa: E501
    assert opened.page.evaluate(sizes) == [[40, 30], [24, 16]]
    opened.page.click("text=By prompt")
    assert opened.page.locator(".prompts .pictures img").count() > 2
    opened.page.click("[data-filter=best]")
    assert opened.page.locator(".completion .pictures img").count() > 2
    assert opened.quiet()
    tried = "new Promise((done) => { const image = new Image(); image.onload = () => done('loaded'); image.onerror = () => done('blocked'); image.src = 'https://example.org/x.png'; })"  # noqa: E501
    assert opened.page.evaluate(tried) == "blocked"
    assert "img-src data:" in opened.said[0]


def test_images_come_with_the_news_of_a_live_run(browser, visit, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "SHARE", 1e9)
    folder = RunFolder(tmp_path / "run")
    folder.begin(resumed_step=None)
    folder.add_metrics(StepMetrics(step=1, values={"reward": 0.0}))
    with PageServer([tmp_path / "run"]) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        opened = visit(server.url)
        folder.add_rollouts(tables(2, prompt(0, picture(0))))
        folder.add_metrics(StepMetrics(step=2, values={"reward": 0.0}))
        opened.live("live, step 2")
        image = opened.page.locator(".group .pictures img")
        playwright.expect(image).to_have_count(1, timeout=READY)
        assert opened.page.evaluate("document.querySelector('.pictures img').decode().then(() => 'shown')") == "shown"
        assert opened.said == []
        server.shutdown()
