"""The charts of a run: which figures are drawn of which scenario."""

from __future__ import annotations

from collections.abc import Iterator

from nsq_fast.page.charts import Bar, Curve, bars, latency_curves

from .figures import METRICS, figure, quantile, shown, value_of
from .results import Run, Scenario
from .suite import titles

_DRAWN = ("rate", "cpu")


def title_of(scenario: Scenario) -> str:
    """What a scenario is called for people."""
    return titles().get(scenario.name, scenario.name)


def charts_of(scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Pairs of a short name and an SVG."""
    metrics = ("busy", "peak") if scenario.settings.kind == "idle" else _DRAWN
    for metric in metrics:
        chart = bar_chart(scenario, metric)
        if chart:
            yield metric, chart
    curves = list(_curves(scenario))
    if curves:
        yield "latency", latency_curves(f"{title_of(scenario)}: latency, and the share of messages within it", curves)


def bar_chart(scenario: Scenario, metric: str) -> str:
    """Bars of one metric over the clients; empty where nobody has it."""
    found = []
    for result in scenario.clients:
        value = value_of(result, metric, scenario.settings.size)
        if value is not None:
            is_ours = result.client.startswith("nsq_fast")
            text = shown(value, metric)
            found.append(Bar(result.client, value.median, value.low, value.high, text, is_ours))
    about = METRICS[metric]
    title = f"{title_of(scenario)}: {about.title}" + ("" if about.unit == about.title else f", {about.unit}")
    return bars(f"{title} ({'more' if about.more_is_better else 'less'} is better)", found) if found else ""


def _curves(scenario: Scenario) -> Iterator[Curve]:
    for result in scenario.clients:
        shares = sorted({share for each in result.rounds for share, _ in each.latency_us})
        points = []
        for share in shares:
            read = quantile(share)
            values = [value for each in result.rounds if (value := read(each, 0)) is not None]
            points.append((share, figure(values).median))
        if points:
            yield Curve(result.client, points)


def core_chart(run: Run) -> str:
    """Bars of the compiled core's workloads; empty where they were not measured."""
    found = []
    for each in run.core:
        value = figure(each.ns_per_message)
        label = f"{each.group.split(',')[0]}: {each.name}"
        found.append(Bar(label[-30:], value.median, value.low, value.high, f"{value.median:,.1f} ns", True))
    return bars("The compiled core: nanoseconds a message (less is better)", found) if found else ""
