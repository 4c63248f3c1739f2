"""Where a run may start: not over another one, not beside one, and not over damaged checkpoints."""

import io
import json
import subprocess
import sys

import pytest

from ulysses_jax.train.metrics import keep_lines_until
from ulysses_jax.train.run_folder import RunFolder
from ulysses_jax.train.terminal import _Patient

HOLDS_THE_LOCK = """
import sys
from ulysses_jax.train.run_folder import RunFolder
with RunFolder(sys.argv[1]).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_folder_of_a_run_in_progress_is_refused_until_its_process_ends(tmp_path):
    folder = RunFolder(tmp_path / "run")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_LOCK, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another run is training in run_dir"), folder.locked():
            pass
    finally:
        other.kill()
        other.communicate()
    with folder.locked():
        pass


def _checkpoint(folder, manifest):
    step = folder.checkpoints / "step_00000003"
    step.mkdir(parents=True)
    if manifest is not None:
        (step / "manifest.json").write_text(manifest)


@pytest.mark.parametrize("resume", [False, "auto"])
def test_a_lock_left_behind_by_a_killed_start_is_no_run(tmp_path, resume):
    folder = RunFolder(tmp_path)
    with folder.locked():
        pass
    assert not folder.resumes(resume)


def test_auto_starts_anew_where_a_kill_left_no_verified_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)
    _checkpoint(folder, manifest=None)
    assert not folder.resumes("auto")


@pytest.mark.parametrize("moved_aside", [False, True])
def test_auto_does_not_start_over_damaged_checkpoints(tmp_path, moved_aside):
    folder = RunFolder(tmp_path)
    _checkpoint(folder, manifest="{damaged")
    if moved_aside:
        (folder.checkpoints / "damaged").mkdir()
        (folder.checkpoints / "step_00000003").rename(
            folder.checkpoints / "damaged" / "step_00000003"
        )
    with pytest.raises(ValueError, match="are all damaged, and starting anew would overwrite"):
        folder.resumes("auto")


def test_metrics_survive_what_a_crash_leaves_in_them(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    good = [{"step": 1, "loss": 2.0}, {"step": 2, "eval_loss": 1.0}, {"step": 3, "loss": 1.5}]
    lines = [json.dumps(record).encode() for record in good]
    metrics.write_bytes(
        b"\n".join([*lines, b"5", b'{"a": 1}', b"\xff\xfe\x00", b'{"step": 4, "lo'])
    )
    assert keep_lines_until(metrics, 2)
    assert metrics.read_bytes() == b"\n".join(lines[:2]) + b"\n"


def test_a_terminal_that_goes_away_or_lacks_a_character_stops_nothing(tmp_path):
    with (tmp_path / "ascii").open("w", encoding="ascii") as stream:
        _Patient(stream).write("2 × 4")
    assert (tmp_path / "ascii").read_text() == "2 ? 4"

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    console = _Patient(Closed())
    assert console.write("lost") == 4
    console.flush()
