"""Reports: the verdict, and a table that loses nothing."""

import pytest

from ulysses_jax.verification.report import Check, Report

GOOD = Check("loss", True, 1e-7, 1e-5)
BAD = Check("gradient of w[0]", False, 3.0, 1e-5, "first at [red]: [4, 0]")
REPORT = Report(
    "one device against seq 4", (GOOD, BAD, Check("collective: all-gather", True, 2, None))
)


def test_report_passes_only_if_every_check_does():
    assert not REPORT.passed
    assert REPORT.failed == (BAD,)
    assert Report("", (GOOD,)).passed
    Report("", (GOOD,)).require()
    with pytest.raises(AssertionError, match=r"gradient of w\[0\]"):
        REPORT.require()


def test_table_marks_failed_checks_lists_them_first_and_keeps_brackets():
    text = str(REPORT)
    assert "FAILED, 1 of 3 checks" in text.splitlines()[0]
    assert text.index("FAIL │ gradient of w[0]") < text.index("ok   │ loss")
    assert "first at [red]: [4, 0]" in text
    assert "passed, all 1 checks" in str(Report("", (GOOD,)))


def test_many_gradients_that_passed_share_a_row_but_stay_in_the_checks():
    gradients = [Check(f"gradient of layer{n}.w", n != 7, n * 1e-8, 1e-5) for n in range(40)]
    report = Report("", (GOOD, *gradients, Check("exchange", True, 4, 1)))
    assert len(report.checks) == 42
    rows = [line.split("│") for line in str(report).splitlines() if "│" in line]
    assert [row[2].strip() for row in rows] == [
        *("gradient of layer7.w", "loss", "39 gradients", "exchange")
    ]
    assert rows[2][3].strip() == "3.9e-07"
    assert "layer39.w" in rows[2][5]
