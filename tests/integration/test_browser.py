"""What a person does in the browser: trigger a pipeline from its form, compare its methods in MLflow, read the report.

Minutes of training on two cores, so it has a target of its own: `make test-browser`. Pictures go to .screenshots.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.browser]

SMALL = {
    ("corpus", "Train Dialogues"): 40,
    ("corpus", "Validation Dialogues"): 4,
    ("corpus", "Test Dialogues"): 4,
    ("sft", "Steps"): 12,
    ("sft", "Batch Size"): 8,
    ("sft", "Save Every"): 12,
    ("policy", "Steps"): 8,
    ("policy", "Prompts Per Rollout"): 4,
    ("policy", "Group Size"): 4,
    ("policy", "Steps Per Rollout"): 2,
    ("policy", "Micro Batch Size"): 8,
    ("policy", "Max Completion Length"): 48,
    ("evaluation", "Instances Per Split"): 6,
    ("evaluation", "Samples"): 2,
    ("evaluation", "Max Completion Length"): 48,
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser") / "pipeline"


def test_a_pipeline_is_triggered_from_its_form(serving: Any, eyes: Any, out: Path) -> None:
    eyes.open_form(serving, "pipeline")
    eyes.see("form")
    eyes.fill(str(out), "out")
    for path, value in SMALL.items():
        eyes.fill(str(value), *path)
    # The form's switch between a value and none: BFCL would take minutes.
    eyes.fill("1", "evaluation", "Bfcl Items Per Category")
    eyes.submit()
    eyes.page.get_by_text("Task Runs", exact=True).first.click()
    eyes.page.get_by_text(re.compile("train (grpo|awpo) · embedded-1m · seed 0")).first.wait_for()
    eyes.see("running")
    assert eyes.wait_for_the_end(serving) == "Completed"
    rows = json.loads((out / "summary.json").read_text())["methods"]
    assert [row["method"] for row in rows] == ["base", "sft", "grpo", "grpo_mixed", "awpo"]
    eyes.page.get_by_text("Artifacts", exact=True).first.click()
    eyes.page.get_by_text("Curves in MLflow").first.wait_for()
    eyes.see("artifacts")
    eyes.page.get_by_text("Curves in MLflow").first.click()


def test_methods_are_compared_in_mlflow(serving: Any, eyes: Any, out: Path) -> None:
    [found] = serving.ask("artifacts/filter", {"artifacts": {"key": {"any_": ["mlflow-comparison"]}}})
    address = re.search(r"\((http[^)\s]+)\)", found["data"])
    assert address, found["data"]
    eyes.page.set_viewport_size({"width": 1700, "height": 950})
    eyes.page.goto(address[1])
    for method in ("grpo", "awpo"):
        eyes.page.get_by_role("link", name=f"train {method} · embedded-1m · seed 0").first.wait_for()
    eyes.page.get_by_role("button", name="Close").click()  # of what would have the charts' room
    eyes.page.get_by_text("clip/radius_mean").first.wait_for()
    eyes.page.locator(".js-plotly-plot").first.wait_for()
    eyes.page.wait_for_timeout(5000)  # charts are drawn one after another
    eyes.see("mlflow-charts")
    rows = eyes.page.get_by_label("Press Space to toggle row selection")
    assert rows.count() == 3
    rows.nth(0).click()
    rows.nth(1).click()
    eyes.page.get_by_role("button", name="Compare").click()
    eyes.page.get_by_text("Comparing 2 Runs").wait_for()
    named = eyes.page.get_by_text(re.compile("train (grpo|grpo_mixed|awpo) · embedded-1m · seed 0"))
    named.nth(1).wait_for()
    eyes.see("mlflow-comparison")


@pytest.mark.parametrize(("name", "width"), [("report", 1280), ("report-on-a-phone", 390)])
def test_the_report_opens_without_a_network(serving: Any, eyes: Any, out: Path, name: str, width: int) -> None:
    asked: list[str] = []
    eyes.page.on("request", lambda request: asked.append(request.url))
    eyes.page.context.set_offline(True)
    eyes.page.set_viewport_size({"width": width, "height": 900})
    eyes.page.goto((out / "report.html").as_uri())
    for title in ("Held-out accuracy", "Methods"):
        eyes.page.get_by_role("heading", name=title, exact=True).wait_for()
    assert [url for url in asked if not url.startswith("file:")] == []
    wider = eyes.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert wider <= 0, f"the page is {wider} pixels wider than a screen of {width}"
    eyes.see(name)


def test_the_report_can_be_printed(serving: Any, eyes: Any, out: Path, tmp_path: Path) -> None:
    eyes.page.goto((out / "report.html").as_uri())
    paper = eyes.page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert paper.startswith(b"%PDF")
    pages = re.findall(rb"/Type\s*/Page(?!s)", paper)
    assert 1 <= len(pages) <= 20
