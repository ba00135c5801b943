"""A worker's prints in the run's log: without progress bars, few at a time, and what is left out is counted."""

from tasks.log_stream import LINES, LONGEST, SECONDS, LogStream

NOISE = [
    "",
    "   ",
    "Loading weights: 100%|██████████| 24/24 [00:00<00:00, 23301.69it/s]",
    "Writing model shards:   0%|          | 0/1 [00:00<?, ?it/s]",
    "3it [00:02,  1.2s/it]",
    "[1:02:03<00:01,  2.1it/s]",
]


class Heard(LogStream):
    def __init__(self) -> None:
        self.now, self.lines = 0.0, []  # type: ignore[var-annotated]
        super().__init__(lambda line: self.lines.append(line), lambda: self.now)


def test_lines_are_handed_on_without_noise() -> None:
    heard = Heard()
    heard.take(["starts", *NOISE, "{'loss': '0.25', 'epoch': '0.5'}  ", "100% of the rows | all"])
    heard.close()
    assert heard.lines == ["starts", "{'loss': '0.25', 'epoch': '0.5'}", "100% of the rows | all"]


def test_what_is_too_much_is_counted_and_told() -> None:
    heard = Heard()
    for number in range(LINES + 7):
        heard.take([f"line {number}"])
    assert heard.lines == [f"line {number}" for number in range(LINES)]
    heard.now += SECONDS
    heard.take(["after"])
    assert heard.lines[LINES:] == ["... and 7 lines more in the log file", "after"]
    heard.take([str(number) for number in range(LINES + 1)])
    heard.close()
    heard.close()
    assert heard.lines[-2:] == [str(LINES - 2), "... and 2 lines more in the log file"]


def test_a_long_line_is_cut_and_says_so() -> None:
    heard = Heard()
    heard.take(["x" * (LONGEST + 200)])
    assert heard.lines == ["x" * LONGEST + f" ... ({LONGEST + 200} characters)"]
