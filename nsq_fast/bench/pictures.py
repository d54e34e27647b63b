"""The charts of a run: which figures are drawn of which scenario."""

from __future__ import annotations

from collections.abc import Iterator

from nsq_fast.page.bars import OTHERS, Bar, Piece, bars
from nsq_fast.page.curves import Line, by_share
from nsq_fast.page.svg import picture

from .figures import METRICS, Figure, figure, quantile, shown, value_of
from .results import Run, Scenario
from .suite import titles

_DRAWN = ("rate", "cpu")
_DRAWN_OF = {"idle": ("busy", "peak"), "start": ("import", "first")}
_OURS = 1


def title_of(scenario: Scenario) -> str:
    """What a scenario is called for people."""
    return titles().get(scenario.name, scenario.name)


def charts_of(scenario: Scenario) -> Iterator[str]:
    """The figures of a scenario, as HTML."""
    for metric in _DRAWN_OF.get(scenario.settings.kind, _DRAWN):
        rows = _rows(scenario, metric)
        if rows:
            yield bars(_title(metric), rows)
    curves = list(_curves(scenario))
    if curves:
        yield by_share("latency, by the share of messages that were as fast", curves)


def picture_of(scenario: Scenario, metric: str) -> str:
    """Bars of one metric over the clients as an SVG that stands alone; empty where nobody has it."""
    rows = _rows(scenario, metric)
    return picture(f"{title_of(scenario)}: {_title(metric)}", rows) if rows else ""


def _title(metric: str) -> str:
    about = METRICS[metric]
    unit = "" if about.unit == about.title else f", {about.unit}"
    return f"{about.title}{unit} ({'more' if about.more_is_better else 'less'} is better)"


def _rows(scenario: Scenario, metric: str) -> list[Bar]:
    found = []
    for result in scenario.clients:
        value = value_of(result, metric, scenario.settings.size)
        if value is not None:
            found.append(_bar(result.client, value, shown(value, metric), result.client.startswith("nsq_fast")))
    return found


def _bar(label: str, value: Figure, text: str, is_ours: bool) -> Bar:
    pieces = [Piece(_OURS if is_ours else OTHERS, value.median)]
    return Bar(label, pieces, text, low=value.low, high=value.high, is_ours=is_ours)


def _curves(scenario: Scenario) -> Iterator[Line]:
    for result in scenario.clients:
        shares = sorted({share for each in result.rounds for share, _ in each.latency_us})
        points = []
        for share in shares:
            read = quantile(share)
            values = [value for each in result.rounds if (value := read(each, 0)) is not None]
            points.append((share, figure(values).median))
        if points:
            yield Line(result.client, points)


def core_chart(run: Run) -> str:
    """Bars of the compiled core's workloads, as HTML; empty where they were not measured."""
    found = []
    for each in run.core:
        value = figure(each.ns_per_message)
        found.append(_bar(f"{each.group}: {each.name}", value, f"{value.median:,.1f} ns", True))
    return bars("nanoseconds a message (less is better)", found) if found else ""
