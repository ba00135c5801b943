"""Links from Prefect to MLflow: to the pages of the server that is known, and to none where none is."""

from __future__ import annotations

from urllib.parse import parse_qs

import pytest

from tasks.links import MLFLOW_URL, comparison_page, run_page
from tasks.tracking_store import Tracking


def test_a_store_behind_a_server_is_its_own_address() -> None:
    tracking = Tracking("http://mlflow.example:5000/", "3")
    assert run_page(tracking, "abc") == "http://mlflow.example:5000/#/experiments/3/runs/abc"
    page = run_page(Tracking("https://me:secret@mlflow.example", "3"), "abc")
    assert page == "https://me@mlflow.example/#/experiments/3/runs/abc"


def test_a_server_that_browsers_know_by_another_name_is_linked_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MLFLOW_URL, "http://127.0.0.1:5000")
    assert run_page(Tracking("http://mlflow:5000", "3"), "abc") == "http://127.0.0.1:5000/#/experiments/3/runs/abc"


def test_a_local_store_has_the_pages_that_are_served_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = Tracking("sqlite:///runs/mlflow.db", "3")
    monkeypatch.setenv(MLFLOW_URL, "http://127.0.0.1:5000")
    page = run_page(tracking, "abc", "report.html")
    assert page == "http://127.0.0.1:5000/#/experiments/3/runs/abc/artifacts/report.html"
    monkeypatch.delenv(MLFLOW_URL)
    assert run_page(tracking, "abc") is None


def test_the_comparison_asks_for_the_policies_of_one_run_best_first() -> None:
    page = comparison_page(Tracking("http://mlflow.example:5000", "3"), "abc")
    assert page is not None
    path, _, asked = page.partition("?")
    assert path == "http://mlflow.example:5000/#/experiments/3/runs"
    fields = parse_qs(asked)
    assert fields["searchFilter"] == ["tags.`awpo.group` = 'abc' and params.stage = 'policy'"]
    assert fields["orderByKey"] == ["metrics.`held_out/accuracy`"]
    assert fields["orderByAsc"] == ["false"]


def test_commands_and_tasks_speak_of_the_same_variable() -> None:
    from flows import prefect_server

    assert prefect_server.MLFLOW_URL == MLFLOW_URL
