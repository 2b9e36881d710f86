"""Formats of numbers for people: about four digits, a fitting unit, and a dash for an unknown value."""

NONE = "–"


def number(amount: float | None) -> str:
    """Return a number with about four significant digits, for example 12,345  200  123.4  1.234  0.012  1.2e-05."""
    if amount is None:
        return NONE
    size = abs(amount)
    if size == 0:
        return "0"
    if size >= 1000 or (size >= 2 and float(amount).is_integer()):
        return f"{amount:,.0f}"
    if size >= 100:
        return f"{amount:.1f}"
    if size >= 0.01:
        return f"{amount:.3f}"
    return f"{amount:.4f}" if size >= 0.001 else f"{amount:.1e}"


def percent(share: float | None) -> str:
    """Return a share (0 to 1) as 0.0% to 100%."""
    if share is None:
        return NONE
    return f"{share:.0%}" if share >= 0.9995 or share == 0 else f"{share:.1%}"


def error_factor(factor: float | None) -> str:
    """Return a factor such as token_mult_prob_error with five decimal places."""
    return NONE if factor is None else f"{factor:.5f}"


def duration(seconds: float | None) -> str:
    """Return seconds as text, for example 12ms  0.12s  12.3s  2m05s  3h07m  2d04h."""
    if seconds is None:
        return NONE
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    return span(round(seconds))


def span(seconds: float | None) -> str:
    """Return whole seconds as text, for clocks on the screen, for example 12s  2m05s  3h07m  2d04h."""
    if seconds is None:
        return NONE
    whole_seconds = int(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds}s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60}m{whole_seconds % 60:02d}s"
    if whole_seconds < 86400:
        return f"{whole_seconds // 3600}h{whole_seconds % 3600 // 60:02d}m"
    return f"{whole_seconds // 86400}d{whole_seconds % 86400 // 3600:02d}h"


def ticking(seconds: float) -> str:
    """Return a time for a clock on the screen: tenths of a second up to 10 s, then whole seconds."""
    return f"{max(0.0, seconds):.1f}s" if seconds < 10 else span(seconds)


def count(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural, for example `1 engine` or `2 engines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def gib(size: float | None) -> str:
    if size is None:
        return NONE
    return f"{size:.1f} GiB" if size >= 9.95 else f"{size:.2f} GiB"
