"""A run's records as JUnit XML: a test case a verdict and a whole layer, skipped what was not run. Source: docs/judge.md §9."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as xml

from ..locate import departure, departures
from .terminal import place, reproduce, share

Record = Mapping[str, Any]
ILLEGAL = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # no character of XML 1.0


def render(records: Sequence[Record]) -> str:
    """A suite whose cases are named as in the layer suite, `layer_30-csa-attn.core-decode`."""
    run, summary = records[0], records[-1]
    verdicts = [r for r in records if r["record"] == "verdict"]
    missing = [r for r in records if r["record"] == "not_run"]
    unmet = sum(r["required"] for r in missing)
    whole = [r for r in records if r["record"] == "drift" and r["curve"] == "forced"]
    counts = {"tests": len(verdicts) + len(whole) + len(missing), "errors": unmet,
              "failures": summary["failed"] + len(departures(records, "forced")),
              "skipped": len(missing) - unmet, "time": summary["volatile"]["seconds"]}  # fmt: skip
    suite = xml.Element("testsuite", {"name": "v4parity", **{name: str(n) for name, n in counts.items()}})
    about = {"model": run["model"], "engine": run["engine"], "profile": run["profile"]["name"], "seed": run["seed"]}
    _properties(suite, {**about, **run["volatile"]})
    for verdict in verdicts:
        _case(suite, run, verdict)
    for r in whole:
        _whole_layer(suite, r)
    for r in missing:
        case = xml.SubElement(suite, "testcase", classname="v4parity", name=_legal(f"{r['op']}-{r['phase']}"), time="0")
        xml.SubElement(case, "error" if r["required"] else "skipped", message=_legal(f"not run: {r['reason']}"))
    root = xml.Element("testsuites")
    root.append(suite)
    xml.indent(root, " ")
    return xml.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: xml.Element, run: Record, r: Record) -> None:
    name = f"{r['layer_id']}-{r['kind']}-{r['op']}-{r['phase']}"
    case = xml.SubElement(suite, "testcase", classname=f"v4parity.{r['layer_id']}", name=_legal(name),
                          time=str(r["volatile"]["seconds"]))  # fmt: skip
    _properties(case, {"budget_used": share(r["budget_used"]), "relative_l2": r["relative_l2"], "flips": r["flips"]})
    bad = [o for o in r["outputs"] if o["verdict"] == "fail"]
    if bad:
        lines = [f"output {o['output']}: budget used {share(o['budget_used'])} in {o['failing_rows']} of {o['rows']} rows, "
                 f"worst at {place(o['worst'])}" for o in bad]  # fmt: skip
        failure = xml.SubElement(case, "failure", message=_legal(lines[0]), type="budget")
        failure.text = _legal("\n".join([*lines, reproduce(run, r)]))


def _whole_layer(suite: xml.Element, r: Record) -> None:
    case = xml.SubElement(suite, "testcase", classname=f"v4parity.{r['layer_id']}", time="0",
                          name=f"{r['layer_id']}-{r['kind']}-whole-{r['phase']}")  # fmt: skip
    _properties(case, {"relative_l2": r["relative_l2"], "rounding": r["rounding"]})
    if departures([r], "forced"):
        xml.SubElement(case, "failure", message=_legal(departure(r)), type="drift")


def _properties(parent: xml.Element, values: Mapping[str, Any]) -> None:
    properties = xml.SubElement(parent, "properties")
    for name, value in values.items():
        xml.SubElement(properties, "property", name=name, value=_legal(str(value)))


def _legal(text: str) -> str:
    return ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)
