"""Rows of the collectives: which are exchanges of the sequence, and which are not."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ulysses_jax import make_mesh
from ulysses_jax.verification.case import Case
from ulysses_jax.verification.exchanges import check_exchanges

CASE = Case(lambda *_: None, {"tokens": np.arange(16).reshape(2, 8)}, None)


def _rows(program, mesh):
    return {check.name: check for check in check_exchanges(CASE, mesh, program)}


def test_shift_of_labels_over_the_border_is_no_exchange():
    mesh = make_mesh(1, 4)
    split = NamedSharding(mesh, PartitionSpec("data", "seq"))
    shift = jax.jit(lambda x: x[:, 1:] * 2, in_shardings=split)
    rows = _rows(shift.lower(CASE.tokens_BS).compile().as_text(), mesh)
    assert rows["collective: collective-permute"].passed
    assert not rows["exchange"].passed


def test_axis_of_one_device_needs_no_exchange():
    assert _rows("", make_mesh(2, 1)) == {}


def test_collectives_count_by_how_often_their_loop_runs():
    program = """
%body (x: f32[2,2,3]) -> f32[2,2,3] {
  %a = f32[2,2,3]{2,1,0} all-to-all(%x), replica_groups={{0,1,2,3}}
}
ENTRY %main (x: f32[2,2,3]) -> f32[2,2,3] {
  %w = f32[2,2,3] while(%x), body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %g = f32[2,8,3]{2,1,0} all-gather(%w), replica_groups={{0,1,2,3}}
}
"""
    rows = _rows(program, make_mesh(1, 4))
    assert rows["exchange"].passed
    assert rows["collective: all-to-all"].measured == 5
    assert rows["collective: all-to-all"].detail == (
        "1 instruction, 60 elements per device; 1 inside loops"
    )
    assert "[2, 8, 3], is as large as an activation" in rows["collective: all-gather"].detail


@pytest.mark.parametrize(("shape", "told"), [("2,8", False), ("2,8,3", True), ("1,8,1", False)])
def test_gather_of_an_activation_is_told_apart_from_one_of_ids(shape, told):
    program = f"""
ENTRY %main (x: f32[2,2]) -> f32[2,8] {{
  %g = f32[{shape}] all-gather(%x), replica_groups={{{{0,1,2,3}}}}
}}
"""
    rows = _rows(program, make_mesh(1, 4))
    assert rows["collective: all-gather"].passed
    assert ("as large as an activation" in rows["collective: all-gather"].detail) == told
