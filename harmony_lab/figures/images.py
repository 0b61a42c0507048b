"""Images: static forms for viewers that clean HTML: of inline SVG they leave words alone, of an image its picture."""

import re
from base64 import b64encode
from html import escape

from harmony_lab.figures.canvas import WIDTH
from harmony_lab.figures.svg import memory_svg, timeline_svg
from harmony_lab.trace import Trace

__all__ = ["as_images", "plan_html", "trace_html"]

_PICTURE = re.compile(r"<svg .*?</svg>", re.DOTALL)
_WORDS = re.compile(r"<title>(.*?)</title><desc>(.*?)</desc>", re.DOTALL)


def as_images(html: str) -> str:
    """The HTML with an ``<img>``, described by the picture's title and description, in place of each inline SVG."""
    return _PICTURE.sub(_image, html)


def plan_html(text: str) -> str:
    """A plan's text, in as many lines as it needs."""
    return f'<pre style="white-space:pre-wrap">{escape(text)}</pre>'


def trace_html(trace: Trace) -> str:
    """An iteration in a sentence, its timeline and its memory over time."""
    return f"<p>{escape(str(trace))}</p>{as_images(timeline_svg(trace) + memory_svg(trace))}"


def _image(found: re.Match[str]) -> str:
    words = _WORDS.search(found[0])
    assert words is not None  # ``figures.canvas.picture`` writes them, escaped
    data = b64encode(found[0].encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{data}" alt="{words[1]}. {words[2]}" width="{WIDTH}" '
        'style="max-width:100%;height:auto">'
    )
