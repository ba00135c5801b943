"""What commands print, and what `awpo doctor` finds."""

from __future__ import annotations

import io
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from awpo.errors import UserError
from flows import doctor, registration
from flows.cli_setup import setup
from flows.screen import duration, last_screen


def row(**values: Any) -> dict[str, Any]:
    base = {
        "method": "awpo_no_difficulty",
        "init": "sft",
        "model": "embedded-1m",
        "seed": 0,
        "reward": -1.234,
        "accuracy": 0.5,
        "accuracy_low": 0.41,
        "accuracy_high": 0.59,
        "response_length": 123.4,
        "seconds": 754.0,
        "greedy": 0.52,
        "test_tools": None,
        "bfcl_v3": 0.0,
        "split": "test_phrasings",
        "run_id": "r",
    }
    return base | values


def printed(rows: list[dict[str, Any]], store: str = "sqlite:////somewhere/runs/mlflow.db") -> str:
    console = Console(file=io.StringIO(), width=80)
    last_screen(console, {"methods": rows, "report": "/somewhere/report.html"}, store, 3700)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_last_screen_fits_a_terminal_and_cuts_nothing() -> None:
    text = printed([row(), row(method="base", init="base", reward=None)])
    for expected in ("awpo_no_difficulty", "0.500 0.41-0.59", "-1.23", "123.4", "12:34", "report.html", "mlflow.db"):
        assert expected in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "awpo serve" in text
    assert "near zero" in text, "a BFCL score of so small a model is explained"


def test_models_and_seeds_are_columns_only_where_they_differ() -> None:
    assert "embedded-1m · seed 0" in printed([row(), row(method="grpo")])
    several = printed([row(method="grpo"), row(method="grpo", seed=1)])
    assert "seed 0" not in several


def test_what_is_wider_than_the_terminal_is_printed_whole() -> None:
    rows = [row(), row(method="awpo_low_variance", seed=1, init="base", model="a-model-with-a-long-name")]
    text = printed(rows)
    assert "…" not in text
    assert "a-model-with-a-long-name" in text
    assert "awpo_low_variance from base" in text


def test_a_start_other_than_sft_is_named() -> None:
    assert "grpo from base" in printed([row(method="grpo", init="base")])


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (3661, "1:01:01")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_constraints_are_read_and_compared(tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text("# comment\nTorch==1.0  # why\nrich == 1\npy_arrow.x==2\n")
    pins = doctor.read_constraints(file)
    assert pins == {"torch": "1.0", "py-arrow-x": "2"}
    assert doctor.read_constraints(tmp_path / "none") == {}
    [torch] = [check for check in doctor.check_packages(pins) if check.name == "torch"]
    assert torch.state == "mend"
    assert "pinned 1.0" in torch.found
    assert torch.how


def test_the_project_is_installed_as_pinned() -> None:
    pins = doctor.read_constraints(doctor.ROOT / "constraints.txt")
    assert pins, "constraints.txt pins nothing"
    assert [check for check in doctor.check_packages(pins) if check.state == "mend"] == []


def test_a_missing_package_is_to_be_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NEEDED_PACKAGES", ("no-such-package-at-all",))
    [check, *_] = doctor.check_packages({})
    assert (check.state, check.how) == ("mend", "make install")


def test_a_store_that_cannot_be_written_is_to_be_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWPO_RUNS", "/proc/nowhere")
    assert doctor.check_store().state == "mend"


def test_a_server_that_is_named_but_not_there_is_to_be_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    [check] = doctor.check_server()
    assert check.state == "mend"
    assert "127.0.0.1:9" in check.found


def test_ports_in_use_are_noted() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert doctor.check_port("port", port, "--x").state == "note"
    assert doctor.check_port("port", port, "--x").state == "ok"


def test_a_server_that_is_something_else_is_to_be_mended() -> None:
    from flows.doctor_server import examine_server

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        [check] = examine_server(f"http://127.0.0.1:{server.server_port}/api")
        server.shutdown()
    assert check.state == "mend"
    assert str(server.server_port) in check.found


@pytest.mark.parametrize("url", ["ftp://somewhere/hook", "hooks.slack.com/x", "http://"])
def test_an_address_that_nobody_can_be_told_at_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registration.NOTIFY, url)
    with pytest.raises(UserError, match=registration.NOTIFY):
        registration.register({})  # before the server is asked for anything


def test_setting_up_needs_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("AWPO_RUNS", str(tmp_path))
    with pytest.raises(UserError, match="awpo serve"):
        setup()
