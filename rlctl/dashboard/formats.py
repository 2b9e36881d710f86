"""Numbers as people read them: about four digits, fitting units, a dash for unknown."""

NONE = "–"


def number(value: float | None) -> str:
    """Return about four significant digits, counts as they are: 12,345  200  123.4  1.234  0.012  1.2e-05."""
    if value is None:
        return NONE
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1000 or (size >= 2 and float(value).is_integer()):
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    if size >= 0.01:
        return f"{value:.3f}"
    return f"{value:.4f}" if size >= 0.001 else f"{value:.1e}"


def percent(value: float | None) -> str:
    """Return a share (0 to 1) as 0.0% to 100%."""
    if value is None:
        return NONE
    return f"{value:.0%}" if value >= 0.9995 or value == 0 else f"{value:.1%}"


def error_factor(value: float | None) -> str:
    """Return token_mult_prob_error with five digits behind its 1."""
    return NONE if value is None else f"{value:.5f}"


def duration(seconds: float | None) -> str:
    """Return seconds like 12ms  0.12s  12.3s  2m05s  3h07m  2d04h."""
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
    """Return whole seconds, for times that run on the screen: 12s  2m05s  3h07m  2d04h."""
    if seconds is None:
        return NONE
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def ticking(seconds: float) -> str:
    """Return a time that runs on the screen: tenths at first, then whole seconds."""
    return f"{max(0.0, seconds):.1f}s" if seconds < 10 else span(seconds)


def count(number: int, what: str) -> str:
    """Return `1 engine`, `2 engines`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def gib(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f} GiB" if value >= 9.95 else f"{value:.2f} GiB"
