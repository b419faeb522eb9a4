"""Format numbers for terminals, reports and messages."""


def count(number: int, noun: str) -> str:
    """Return a number with its noun, which is in the plural unless the number is 1."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def number(value: float | None) -> str:
    """Return a number with three significant digits, or a whole number with thousands separators."""
    if value is None:
        return "–"  # noqa: RUF001
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.3g} M" if abs(value) < 999.5e6 else f"{value / 1e9:,.4g} G"
    if float(value).is_integer() or abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1g}"


def signed(value: float) -> str:
    """Return a number with its sign."""
    return f"{'+' if value > 0 else '−' if value < 0 else '±'}{number(abs(value))}"  # noqa: RUF001


def percent(value: float | None) -> str:
    """Return a fraction as a percentage."""
    if value is None:
        return "unknown"
    return f"{value:.0%}" if value == 0 or value >= 0.01 else "<1%"


def seconds(value: float | None) -> str:
    """Return a duration in the largest unit that gives at least two."""
    if value is None:
        return "–"  # noqa: RUF001
    if value < 10:
        return f"{value:.1f} s" if value >= 0.1 or value == 0 else f"{value:.1g} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:,.1f} h"


def size(bytes_: int) -> str:
    """Return a size in GiB, or in MiB if it is smaller."""
    return f"{bytes_ / (1 << 30):,.1f} GiB" if bytes_ >= 1 << 30 else f"{bytes_ / (1 << 20):,.0f} MiB"


def dollars(value: float) -> str:
    """Return an amount with cents, or with two significant digits below ten cents."""
    return f"${value:,.2f}" if value >= 0.1 or value == 0 else f"${value:.2g}" if value >= 0.0001 else "<$0.0001"
