"""How quantities are read and written: bytes, seconds, rates, shares.  All formatting lives here."""

import re

from harmony_lab.errors import QuantityError

__all__ = [
    "format_bytes",
    "format_change",
    "format_count",
    "format_rate",
    "format_seconds",
    "format_spread",
    "parse_bytes",
    "parse_rate",
]

_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
_PER_SECOND = re.compile(r"\s*(/|p)s\s*$", re.IGNORECASE)
_NUMBER = re.compile(r"\s*[0-9]*\.?[0-9]+(?:e[0-9]+)?\s*", re.IGNORECASE)
_SLOWEST = 1e6  # bytes per second: no link is slower
_UNCHANGED = 5e-4  # shares that would read 0.0%
_BITS = re.compile(r"[kKmMgGtT]i?b$|[bB]its?$")  # a lower-case b


def parse_bytes(text: str | int) -> int:
    """Bytes from ``"64MiB"``, ``"1.5 GB"``, ``"2e9"`` or an integer; decimal unless the unit has an ``i``."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise QuantityError(f"a size like '64MiB', '1.5GB' or 1073741824 was expected, got {text!r}")
    number, prefix, binary = match.groups()
    return round(float(number) * (_BINARY if binary else _DECIMAL)[prefix.upper()])


def parse_rate(text: str | float) -> float:
    """Bytes per second from ``"12GB/s"``, ``"11.5 GiB/s"`` or a number; as a text that has to be a million or
    more: ``"5"`` lacks its unit."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return float(text)
    amount = _PER_SECOND.sub("", str(text))
    if _NUMBER.fullmatch(amount) and float(amount) < _SLOWEST:
        raise QuantityError(
            f"a rate with its unit like '12GB/s' was expected, got {text!r}: write '{amount.strip()}GB/s'"
        )
    if _BITS.search(amount):
        raise QuantityError(
            f"bytes per second like '12GB/s' were expected, {text!r} is in bits; divide by 8 and write 'B'"
        )
    try:
        return float(parse_bytes(amount))
    except QuantityError:
        raise QuantityError(f"a rate like '12GB/s' or '800MiB/s' was expected, got {text!r}") from None


def format_bytes(num_bytes: float) -> str:
    """``"7.9 GiB"``: three significant digits, binary units."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 999.5:
            return f"{value:.0f} B" if unit == "B" else f"{_three_digits(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} TiB"


def format_rate(bytes_per_s: float) -> str:
    """``"11.5 GiB/s"``."""
    return format_bytes(bytes_per_s) + "/s"


def format_seconds(seconds: float) -> str:
    """``"1.24 s"``, ``"310 ms"``, ``"42.0 µs"``, ``"3 min 05 s"``."""
    if abs(seconds) >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    if seconds == 0 or abs(seconds) >= 0.9995:
        return f"{_three_digits(seconds)} s"
    if abs(seconds) >= 0.9995e-3:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds * 1e6)} µs"


def format_spread(share: float | None) -> str:
    """``"3%"``, ``"0.4%"``: how far repeated measurements were apart; nothing where there was one only.

    ``"over 100%"`` where that is all that is worth knowing: one of them was disturbed.
    """
    if share is None:
        return ""
    if share > 1:
        return "over 100%"
    return f"{share:.0%}" if share >= 0.00995 else f"{share:.1%}"


def format_change(share: float) -> str:
    """``"+4.1%"``, ``"−4.1%"``, ``"±0%"``: by how much something is more or less than it was."""
    return "±0%" if abs(share) < _UNCHANGED else f"{share:+.1%}".replace("-", "−")


def format_count(count: float) -> str:
    """``"6.41 M"``: a number of parameters, tokens or operations."""
    value = float(count)
    for unit in ("", "K", "M", "B"):
        if abs(value) < 999.5:
            return f"{value:.0f}" if unit == "" else f"{_three_digits(value)} {unit}"
        value /= 1000
    return f"{_three_digits(value)} T"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
