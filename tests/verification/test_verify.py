"""A right model passes, and each mistake planted in one fails the rows that it concerns."""

import pytest

GRADIENTS = {
    "gradient of embedding",
    *(f"gradient of attention.{name}" for name in ("query", "key", "value", "out")),
}
VALUES = {"loss", "outputs"} | GRADIENTS
PADDING = {f"padding: {part}" for part in ("outputs", "loss", "gradients")}
BORDER = "row 0, token 4, the first of part 1 of 4"


def _leaks(failed):
    """What the failed leakage rows say, by the (row, token) that was changed."""
    prefix = "leakage from row "
    return {
        tuple(map(int, name.removeprefix(prefix).split(", token "))): check.detail
        for name, check in failed.items()
        if name.startswith(prefix)
    }


def test_right_model_passes_every_check(verified):
    report, failed = verified(mesh=(1, 4))
    assert report.passed
    assert not failed
    checks = {check.name: check for check in report.checks}
    assert checks.keys() >= VALUES | PADDING | {"exchange", "collective: all-to-all"}
    # q, k, v and the output, forward and backward, some of them combined.
    assert checks["exchange"].measured >= 3
    assert checks["outputs"].limit == 1e-5
    probed = [name for name in checks if name.startswith("leakage")]
    # Ends, both sides of a border, inside a part, the last segment: none of them padded.
    assert probed == [
        f"leakage from row {row}, token {token}"
        for row, token in [(0, 0), (0, 15), (1, 4), (2, 3), (3, 3), (3, 10)]
    ]


def test_positions_local_to_a_shard_fail_from_the_second_shard_on(verified):
    _, failed = verified("local positions")
    assert failed.keys() == VALUES
    assert f"first at [0, 4, 0]: {BORDER}" in failed["outputs"].detail


def test_gradient_summed_twice_fails_alone_and_is_called_a_multiple(verified):
    report, failed = verified("summed twice")
    assert failed.keys() == {"gradient of attention.out"}
    assert "4.00 times the single-device gradient" in failed["gradient of attention.out"].detail
    assert "4.00 times" in str(report)


def test_attention_within_the_shard_fails_as_an_exchange_that_never_runs(verified):
    report, failed = verified("local attention")
    leaks = _leaks(failed)
    assert failed.keys() - {f"leakage from row {r}, token {t}" for r, t in leaks} == (
        VALUES | {"exchange"}
    )
    assert "tokens of different parts never meet" in failed["exchange"].detail
    assert BORDER in failed["outputs"].detail
    assert leaks[0, 0] == f"changes {BORDER}, on one device but not on the mesh"
    assert not any(check.name == "collective: all-to-all" for check in report.checks)


def test_sequence_replicated_everywhere_fails_though_every_value_is_right(verified):
    report, failed = verified("replicated")
    assert failed.keys() == {"exchange"}
    assert "each device computes the whole sequence" in failed["exchange"].detail
    (gathers,) = (c for c in report.checks if c.name == "collective: all-gather")
    assert "[4, 16, 8], is as large as an activation of the whole sequence" in gathers.detail


@pytest.mark.parametrize(
    ("dropped", "leaks", "reason", "first"),
    [
        (
            ("segments",),
            {(0, 0): 5, (1, 4): 9, (2, 3): 6},
            "of another segment",
            "[0, 5, 0]: row 0, token 5, in part 1 of 4",
        ),
        # A causal model protects valid tokens from the padding behind them.
        (
            ("causal", "lengths"),
            {(0, 15): 5, (1, 4): 0, (2, 3): 0, (3, 10): 3},
            "which comes before it",
            "[0, 0, 0]: row 0, token 0, the first of part 0 of 4",
        ),
    ],
)
def test_mask_dropped_on_the_mesh_fails_values_and_leaks_there(
    verified, dropped, leaks, reason, first
):
    _, failed = verified(dropped_on_mesh=dropped)
    assert f"first at {first}" in failed["outputs"].detail
    found = _leaks(failed)
    assert found.keys() == leaks.keys()
    for (row, token), seeing in leaks.items():
        assert found[row, token].startswith(f"changes row {row}, token {seeing},")
        assert found[row, token].endswith(f"{reason}, on the mesh")
    rest = {name for name in failed if not name.startswith("leakage")}
    assert rest == VALUES | (PADDING if "lengths" in dropped else set())
    if "lengths" in dropped:
        assert all(failed[name].detail.endswith("on the mesh") for name in PADDING)


def test_masks_dropped_in_both_runs_fail_what_was_declared_alone(verified):
    _, failed = verified(dropped=("segments", "causal", "lengths"))
    leaks = _leaks(failed)
    assert failed.keys() - {f"leakage from row {r}, token {t}" for r, t in leaks} == PADDING
    segment = "changes row 0, token 5, in part 1 of 4, of another segment, in both runs"
    assert leaks[0, 0] == segment
    assert leaks[3, 10] == (
        "changes row 3, token 0, the first of part 0 of 4, which comes before it, in both runs; "
        "changes row 3, token 0, the first of part 0 of 4, of another segment, in both runs"
    )
    # Row 1 is the first with padding, which its first token sees as well.
    assert failed["padding: outputs"].detail == (
        "row 1, token 0, the first of part 0 of 4, changes with padding in both runs"
    )
    assert failed["padding: outputs"].measured == 13 + 11
    for part in ("loss", "gradients"):
        assert failed[f"padding: {part}"].detail.endswith("in both runs")
