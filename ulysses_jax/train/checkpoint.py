"""Checkpoints of a run: asynchronous atomic saves, and restores that use only what is verified.

On disk, under the directory given:

    step_00000020/                        one committed step: Orbax's files and manifest.json
    step_00000030.orbax-checkpoint-tmp/   a save in progress, or cut short
    step_00000010.deleting/               an old step being deleted, or a deletion cut short
    damaged/step_00000025/                a step that was found damaged or unverified

Every change of state is one rename: Orbax's commit, the manifest, moving aside, the start of a
deletion. A process may therefore be killed at any moment. Arrays are stored flat, each under its
path in the state (`params.layers.w`), padded as they are in memory; nothing stored depends on the
mesh, and a restore truncates or zero-pads each array to the shape asked for.

All processes must see the same directory. The first process alone verifies, decides and cleans up;
the others wait for its decision and follow it.
"""

import itertools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from ulysses_jax.train import manifest
from ulysses_jax.train.manifest import DamagedCheckpoint, Manifest

State = TypeVar("State")
Decision = TypeVar("Decision")

DAMAGED_FOLDER = "damaged"
_STEP_NAME = re.compile(r"step_(\d{8,})")
_UNFINISHED_NAME = re.compile(r"step_\d{8,}\.(orbax-checkpoint-tmp|deleting)")
_DELETING_SUFFIX = ".deleting"
# How long the other processes wait while the first one hashes files: 360 GB at 0.1 GB/s.
_PATIENCE_MS = 3_600_000


class Checkpoints:
    """The checkpoints of one run in one directory.

    Except for `check` and `latest_step`, every method must be called by all processes, in the same
    order. Creating one that is not `read_only` deletes what killed saves left behind, so a
    directory has at most one such owner at a time.

    Args:
      directory: where the steps lie; created by the first save.
      keep: how many of the newest verified checkpoints are kept, at least 1.
      identity: nested JSON values that say what the run is: model fields, data fingerprint,
        *logical* array shapes (stored shapes depend on the mesh and are not compared).
      report: called in the first process with one message per checkpoint that is not used.
      read_only: nothing is moved or deleted, so that another process may be saving meanwhile; a
        restore compares only the identity fields given here and may ask for a part of the state.

    Raises:
      ValueError: `keep` is below 1, or `identity` cannot be written as JSON.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        identity: Mapping[str, Any],
        report: Callable[[str], None] = print,
        *,
        read_only: bool = False,
    ) -> None:
        if keep < 1:
            raise ValueError(f"checkpoint.keep is {keep}, but at least 1 must be kept: raise it")
        try:
            self._identity = json.loads(json.dumps(identity, allow_nan=False))
        except TypeError as error:
            raise ValueError(f"the identity {identity!r} cannot be written as JSON") from error
        self._directory = directory.absolute()
        self._keep = keep
        self._report = report
        self._read_only = read_only
        # Made in the background, a folder that cannot be made leaves Orbax's threads waiting for
        # five minutes; made by `save`, it raises there.
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(),
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        if not read_only and jax.process_index() == 0:
            self._delete_unfinished()

    def save(self, step: int, state: Any) -> None:
        """Starts saving `state`, a pytree of jax.Arrays, as `step`; returns once it is copied.

        The arrays may be donated as soon as this returns. Waits for an earlier save that is still
        running. Does nothing when the step is already there and verified; a damaged one is
        reported and moved aside.

        Raises:
          ValueError: the step is there with another identity.
          Exception: whatever an earlier save failed with.
        """
        assert not self._read_only, "a read-only Checkpoints cannot save"
        self._finish_pending()
        if self._decided_by_first_process(lambda: self._is_saved(step)):
            return
        arrays = _by_path(state)
        records = {path: _record(array) for path, array in arrays.items()}
        self._orbax.save(self._path(step), args=ocp.args.PyTreeSave(arrays))
        self._pending = self._worker.submit(self._seal, step, records)

    def restore(self, abstract_state: State) -> tuple[int, State]:
        """Restores the newest verified checkpoint into the shapes and shardings asked for.

        The identity is compared first, then every file is read and checked. A checkpoint that is
        damaged or unverified is reported and moved to `damaged/`, and the one before it is tried.

        Args:
          abstract_state: the state's pytree with jax.ShapeDtypeStruct leaves that carry shardings.
            A stored array is truncated or padded with zeros, at the end of each dimension.

        Returns:
          The step and the state.

        Raises:
          ValueError: no usable checkpoint is left, or the newest one is of another run; the message
            names every field or array that differs, with both values.
        """
        self._finish_pending()
        targets = _by_path(abstract_state)
        step = self._decided_by_first_process(lambda: self._choose(targets))
        arguments = {
            path: ocp.ArrayRestoreArgs(
                sharding=target.sharding,
                global_shape=target.shape,
                dtype=target.dtype,
                strict=False,
            )
            for path, target in targets.items()
        }
        restored = self._orbax.restore(
            self._path(step),
            args=ocp.args.PyTreeRestore(
                item=targets, restore_args=arguments, partial_restore=self._read_only
            ),
        )
        leaves = [restored[path] for path in targets]
        return step, jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)

    def latest_step(self) -> int | None:
        """See the function of the same name."""
        return latest_step(self._directory)

    def check(self) -> None:
        """Raises what the last save failed with, if it has failed by now. Never blocks."""
        if self._pending is not None and self._pending.done():
            self._finish_pending()

    def wait(self) -> None:
        """Blocks until the last save is committed and verified, in all processes.

        Raises:
          Exception: whatever the last save failed with.
        """
        self._finish_pending()
        self._decided_by_first_process(lambda: None)

    def close(self) -> None:
        """Finishes the last save and frees the threads; raises what that save failed with."""
        try:
            self._finish_pending()
        finally:
            self._worker.shutdown()
            self._orbax.close()

    def _path(self, step: int) -> Path:
        return _step_path(self._directory, step)

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _seal(self, step: int, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Runs beside training: waits for Orbax's commit, then writes the manifest and prunes."""
        self._orbax.wait_until_finished()
        if jax.process_index() == 0:
            manifest.write(self._path(step), step, self._identity, records)
            self._prune(step)

    def _prune(self, newly_saved: int) -> None:
        """Deletes verified checkpoints beyond the newest `keep`, but never the one just saved."""
        verified = [
            step for step in _committed_steps(self._directory) if _has_manifest(self._path(step))
        ]
        for step in verified[self._keep :]:
            if step != newly_saved:
                path = self._path(step)
                doomed = path.rename(path.with_name(path.name + _DELETING_SUFFIX))
                shutil.rmtree(doomed)

    def _delete_unfinished(self) -> None:
        if self._directory.is_dir():
            for path in self._directory.iterdir():
                if _UNFINISHED_NAME.fullmatch(path.name):
                    shutil.rmtree(path)

    def _is_saved(self, step: int) -> bool:
        return self._path(step).exists() and self._usable(step) is not None

    def _choose(self, targets: Mapping[str, jax.ShapeDtypeStruct]) -> int:
        steps = _committed_steps(self._directory)
        if not steps:
            raise ValueError(
                f"there is no checkpoint in {self._directory}: start the run without resuming, or "
                "name the run folder that holds one"
            )
        for step in steps:
            found = self._usable(step)
            if found is not None:
                self._require_same_arrays(step, found, targets)
                return step
        raise ValueError(
            f"none of the {len(steps)} checkpoints in {self._directory} can be used, all are "
            f"damaged or unverified (steps {', '.join(map(str, steps))}): restore the folder from "
            "a copy, or start the run without resuming"
        )

    def _usable(self, step: int) -> Manifest | None:
        """The step's manifest if all its files are as written; otherwise moves the step aside."""
        path = self._path(step)
        try:
            found = manifest.read(path)
            self._require_same_identity(step, found)
            manifest.verify(path, found)
        except DamagedCheckpoint as error:
            place = "" if self._read_only else f"; moved to {self._move_aside(path)}"
            self._report(f"checkpoint of step {step} is not used: {error}{place}")
            return None
        return found

    def _move_aside(self, path: Path) -> Path:
        folder = self._directory / DAMAGED_FOLDER
        folder.mkdir(exist_ok=True)
        names = itertools.chain([path.name], (f"{path.name}.{n}" for n in itertools.count(1)))
        free = next(folder / name for name in names if not (folder / name).exists())
        return path.rename(free)

    def _require_same_identity(self, step: int, found: Manifest) -> None:
        differing = manifest.differences(
            found.identity, self._identity, only_expected=self._read_only
        )
        if differing:
            raise ValueError(
                f"the checkpoint of step {step} in {self._directory} is of another run: "
                f"{'; '.join(differing)}. Use the checkpoint's settings, or another run folder"
            )

    def _require_same_arrays(
        self, step: int, found: Manifest, targets: Mapping[str, jax.ShapeDtypeStruct]
    ) -> None:
        """Orbax would cast another dtype in silence, and fail on other names with a long dump."""
        # The stored lengths depend on the mesh: only dtypes and numbers of dimensions must agree.
        stored = {path: _without_lengths(record) for path, record in found.arrays.items()}
        wanted = {path: _without_lengths(_record(target)) for path, target in targets.items()}
        differing = manifest.differences(stored, wanted, only_expected=self._read_only)
        if differing:
            raise ValueError(
                f"the checkpoint of step {step} in {self._directory} holds other arrays: "
                f"{'; '.join(differing)}. Use the checkpoint's model and optimizer, or another "
                "run folder"
            )

    def _decided_by_first_process(self, decide: Callable[[], Decision]) -> Decision:
        """What `decide` returns or raises in the first process, in every process.

        The result must be a JSON value. Processes wait at the coordinator and not in a collective:
        hashing may outlast the timeout of a collective.
        """
        if jax.process_count() == 1:
            return decide()
        outcome: dict[str, Any] = {}
        failure: Exception | None = None
        if jax.process_index() == 0:
            try:
                outcome["result"] = decide()
            except Exception as error:
                failure = error
                outcome["error"] = str(error)
        wait_for_all = ocp.multihost.get_barrier_sync_fn()
        wait_for_all(key="ulysses_jax_checkpoint_decision", timeout_ms=_PATIENCE_MS)
        outcome = _broadcast(outcome)
        if failure is not None:
            raise failure
        if "error" in outcome:
            raise ValueError(outcome["error"])
        return outcome["result"]


def latest_step(directory: Path) -> int | None:
    """The newest step with a whole manifest, or None. Does not read the arrays' files."""
    steps = _committed_steps(directory)
    return next((step for step in steps if _has_manifest(_step_path(directory, step))), None)


def has_sealed_remains(directory: Path) -> bool:
    """Whether a checkpoint was once complete here, be it damaged since or moved aside."""
    places = [directory, directory / DAMAGED_FOLDER]
    steps = (step for place in places for step in place.glob("step_*"))
    return any((step / manifest.MANIFEST_NAME).exists() for step in steps)


def _committed_steps(directory: Path) -> list[int]:
    """The steps that Orbax committed, newest first."""
    if not directory.is_dir():
        return []
    names = (_STEP_NAME.fullmatch(path.name) for path in directory.iterdir())
    return sorted((int(name[1]) for name in names if name), reverse=True)


def _step_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


def _has_manifest(path: Path) -> bool:
    try:
        manifest.read(path)
    except DamagedCheckpoint:
        return False
    return True


def _broadcast(outcome: dict[str, Any]) -> dict[str, Any]:
    text = np.frombuffer(json.dumps(outcome).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
    # Every process must offer an array of the same length; only the first one's counts.
    shared = multihost_utils.broadcast_one_to_all(np.resize(text, length))
    return json.loads(np.asarray(shared).astype(np.uint8).tobytes())


def _by_path(tree: Any) -> dict[str, Any]:
    """The leaves under names such as `params.layers.w`, whatever classes the nodes have."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves of the state have the same path"
    return named


def _record(array: Any) -> dict[str, Any]:
    return {"dtype": np.dtype(array.dtype).name, "shape": list(array.shape)}


def _without_lengths(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"dtype": record["dtype"], "dimensions": len(record["shape"])}
