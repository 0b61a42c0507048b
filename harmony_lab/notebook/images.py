"""Images: pictures of a static form as images, for viewers that clean HTML; of inline SVG they leave words alone."""

import re
from base64 import b64encode

from harmony_lab.figures.canvas import WIDTH

__all__ = ["as_images"]

_PICTURE = re.compile(r"<svg .*?</svg>", re.DOTALL)
_WORDS = re.compile(r"<title>(.*?)</title><desc>(.*?)</desc>", re.DOTALL)


def as_images(html: str) -> str:
    """The HTML with an ``<img>``, described by the picture's title and description, in place of each inline SVG."""
    return _PICTURE.sub(_image, html)


def _image(found: re.Match[str]) -> str:
    words = _WORDS.search(found[0])
    assert words is not None  # ``figures.canvas.picture`` writes them, escaped
    data = b64encode(found[0].encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{data}" alt="{words[1]}. {words[2]}" width="{WIDTH}" '
        'style="max-width:100%;height:auto">'
    )
