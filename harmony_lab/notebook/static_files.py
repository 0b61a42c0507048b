"""The scripts and style sheets that travel to the page, as text."""

from importlib.resources import files

__all__ = ["static_text"]


def static_text(name: str) -> str:
    """The content of a file in ``static/``.

    A widget class gets texts, not paths: for a path, anywidget keeps every widget made alive, to reload it in place.
    """
    return files("harmony_lab.notebook").joinpath("static", name).read_text(encoding="utf-8")
