"""Links from Prefect's pages to MLflow's, as artifacts of the flow run."""

from __future__ import annotations

import os
from urllib.parse import quote, urlencode

from prefect.artifacts import create_link_artifact
from prefect.context import FlowRunContext

from tasks.tracking import GROUP, TrackedRun
from tasks.tracking_store import Tracking

MLFLOW_URL = "AWPO_MLFLOW_URL"
"""Environment variable with the address of MLflow's pages for a browser, where that is not the store's own: of a
database, which `awpo serve` sets it for, or of a server that workers know by another name."""


def mlflow_pages(tracking: Tracking) -> str | None:
    """The address of MLflow's pages; None where no server is known."""
    base = os.environ.get(MLFLOW_URL) or (tracking.store if tracking.store.startswith(("http://", "https://")) else "")
    return base.rstrip("/") or None


def run_page(tracking: Tracking, run_id: str, artifact: str = "") -> str | None:
    """The address of a run's page in MLflow, or of one of its artifacts there; None where no server is known."""
    base = mlflow_pages(tracking)
    if base is None:
        return None
    page = f"{base}/#/experiments/{tracking.experiment_id}/runs/{run_id}"
    return f"{page}/artifacts/{artifact}" if artifact else page


def link_run(run: TrackedRun) -> None:
    """A link from the present flow run to the run in MLflow that tells of it."""
    _link("mlflow-run", run_page(run.tracking, run.run_id), "Run in MLflow", "Metrics, parameters and inputs")


def link_report(run: TrackedRun, name: str) -> None:
    """A link from the present flow run to its report, an artifact called `name` of the run in MLflow."""
    _link("report-page", run_page(run.tracking, run.run_id, name), "Report", "Curves and tables of all methods")


def comparison_page(tracking: Tracking, run_id: str) -> str | None:
    """The address of MLflow's charts of all policy training under a run, best first; None where no server is known.

    Sorted by anything but time, MLflow shows the runs themselves and not the closed folder of their parent.
    """
    base = mlflow_pages(tracking)
    if base is None:
        return None
    asked = {
        "searchFilter": f"tags.`{GROUP}` = '{run_id}' and params.stage = 'policy'",
        "orderByKey": "metrics.`held_out/accuracy`",
        "orderByAsc": "false",
        "compareRunsMode": "CHART",
        "workflowType": "machine_learning",
    }
    return f"{base}/#/experiments/{tracking.experiment_id}/runs?{urlencode(asked, quote_via=quote)}"


def link_comparison(run: TrackedRun) -> None:
    """A link from the present flow run to the charts of the methods that were trained in it."""
    _link(
        "mlflow-comparison", comparison_page(run.tracking, run.run_id), "Curves in MLflow", "The methods side by side"
    )


def _link(key: str, page: str | None, text: str, description: str) -> None:
    if page and FlowRunContext.get():
        create_link_artifact(page, text, key=key, description=f"[{text}]({page}): {description}")
