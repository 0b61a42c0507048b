"""Reports are one offline page that holds every part and escapes what users wrote."""

import re

from figures.pipelines import pipeline_trace, ranking, small_profile

from harmony_lab.figures.report import Section, report_html, sections_html, training_report, training_sections
from harmony_lab.plan import Plan
from harmony_lab.trace import Origin

PLAN = Plan.parse("pp minibatch=2 forward=2[0:2] backward=2[0:2,2:4] devices=0,1")


def everything() -> dict:
    return {
        "profile": small_profile(),
        "machine": pipeline_trace().machine,
        "result_frame": ranking(),
        "plan": PLAN,
        "predicted": pipeline_trace(),
        "measured": pipeline_trace(Origin.MEASURED),
        "losses": [3.0, 2.0],
        "facts": {"optimizer": "AdamW", "note": "a < b"},
    }


def test_the_report_has_every_part() -> None:
    page = training_report(**everything())
    for part in (
        "Summary",
        "One iteration",
        "Plan",
        "Loss",
        "Timeline",
        "Memory",
        "Links",
        "Swap volume",
        "Candidates",
        "Layers",
    ):
        assert f"<h2>{part}</h2>" in page
    assert "<th>predicted</th><th>measured</th>" in page
    assert str(PLAN) in page
    assert page.count("<svg") == 7  # loss, two timelines, two memories, links, swaps
    assert "<td>5.75 MiB</td><td>5.75 MiB</td>" in page


def test_the_report_needs_no_network_and_no_scripts() -> None:
    page = training_report(**everything())
    assert "<script" not in page
    assert "@import" not in page
    assert set(re.findall(r"https?://[^\"'<> ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|iframe)\b", page)


def test_what_users_named_is_escaped() -> None:
    page = training_report(**{**everything(), "facts": {"<b>": "a < b"}})
    assert "Tiny&lt;GPT&gt;" in page
    assert "<td>a &lt; b</td>" in page
    assert "<GPT>" not in page


def test_the_report_is_light_or_dark_as_the_reader_wishes() -> None:
    assert "prefers-color-scheme: dark" in training_report(**everything())


def test_what_is_not_there_yet_is_left_out() -> None:
    nothing = dict.fromkeys(("profile", "result_frame", "plan", "predicted", "measured"))
    sections = training_sections(**{**everything(), **nothing, "losses": []})
    assert [section.title for section in sections] == ["Summary"]
    planned = training_sections(**{**everything(), "measured": None, "losses": []})
    assert "Loss" not in [section.title for section in planned]
    assert sections_html(planned).count("<svg") == 4


def test_sections_stand_in_the_order_given() -> None:
    page = report_html("A <title>", [Section("One", "<p>1</p>"), Section("Two", "<p>2</p>")])
    assert "<title>A &lt;title&gt;</title>" in page
    assert page.index("<p>1</p>") < page.index("<p>2</p>")
