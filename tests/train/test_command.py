"""The commands as a user starts them: what a run leaves, what is done with it, what is refused."""

import math
import threading

import pytest

from ulysses_jax.train import inference
from ulysses_jax.train.command_line import (
    load,
    parse,
    parse_evaluate,
    parse_generate,
    run_command_line,
)
from ulysses_jax.train.run import run


@pytest.fixture
def train_here(capfd):
    """Runs the training command in this process: (exit code, stdout, stderr)."""

    def command(*argv):
        threads = set(threading.enumerate())
        code = run_command_line(lambda: run(parse([*map(str, argv)])))
        begun = set(threading.enumerate()) - threads
        # Orbax keeps its event loop's own pool for the whole process.
        left = [t.name for t in begun if not t.daemon and not t.name.startswith("asyncio")]
        assert left == []
        return code, *capfd.readouterr()

    return command


@pytest.fixture
def refused(train_here):
    """The one message of a run that ends with code 2."""

    def message(*argv):
        code, _, errors = train_here(*argv)
        assert code == 2, errors
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
        return errors.removeprefix("error: ").rstrip("\n")

    return message


def test_whole_run_leaves_every_file_of_its_folder(whole_run, records, tiny_run, in_own_process):
    folder, printed = whole_run
    names = {path.name for path in folder.iterdir()}
    (events,) = folder.glob("events.*")
    assert names == {
        *("config.yaml", "data.txt", "metrics.jsonl", "checkpoints", "loss.png", "sample.txt"),
        ".lock",
        events.name,
    }
    assert load(folder / "config.yaml") == parse(
        tiny_run(folder, *in_own_process, "--train.sample_tokens", "4")
    )
    train, evaluations = records(folder)
    keys = "step loss grad_norm learning_rate tokens_seen step_time_s tokens_per_second mfu"
    assert all(list(record) == [*keys.split(), "hfu_paper"] for record in train)
    assert [record["step"] for record in train] == list(range(1, 49))
    assert [record["tokens_seen"] for record in train] == [64 * step for step in range(1, 49)]
    assert {(record["mfu"], record["hfu_paper"]) for record in train} == {(None, None)}
    assert train[-1]["loss"] < train[0]["loss"] - 0.5
    (evaluation,) = evaluations
    assert list(evaluation) == ["step", "eval_loss", "bits_per_token"]
    assert evaluation["bits_per_token"] == pytest.approx(evaluation["eval_loss"] / math.log(2))
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert len((folder / "sample.txt").read_text()) > 4
    assert [p.name for p in sorted((folder / "checkpoints").iterdir())] == [
        *("step_00000045", "step_00000048")
    ]
    for said in ("data 2 × seq 2", "ZeRO-3", "bits per byte", "bigram", str(folder / "loss.png")):
        assert said in printed


def test_finished_run_generates_the_same_text_from_the_same_seed(whole_run, start, ended):
    folder, _ = whole_run
    words = ["-m", "ulysses_jax", "generate", "--run_dir", folder]
    ((code, printed, errors),) = ended(
        start(*words, *["--prompt", "def", "--tokens", "5", "--temperature", "0.7", "--seed", "3"])
    )
    assert (code, errors) == (0, "")
    assert printed.startswith("def")
    # Five bytes more; one that is no character by itself still prints as one.
    assert 4 <= len(printed.rstrip("\n")) <= 8


@pytest.mark.parametrize(("length", "tokens"), [(17, 1), (8, 9)])
def test_text_longer_than_the_model_is_refused(whole_run, capfd, monkeypatch, length, tokens):
    # The devices of this process are there already.
    monkeypatch.setattr(inference, "start_backend", lambda *arguments: None)
    words = ["--run_dir", str(whole_run[0]), "--prompt", "x" * length, "--tokens", str(tokens)]
    assert run_command_line(lambda: inference.generate_text(parse_generate(words))) == 2
    printed, errors = capfd.readouterr()
    assert printed == ""
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert str(length) in errors
    assert "16" in errors


@pytest.fixture
def evaluated(whole_run, capfd):
    """Evaluates the whole run in this process: its loss, its number of tokens and what it says."""

    def command(*argv):
        words = ["--run_dir", str(whole_run[0]), *map(str, argv)]
        assert run_command_line(lambda: inference.evaluate_run(parse_evaluate(words))) == 0
        printed = capfd.readouterr().out
        words = printed.split("held-out loss ")[1].replace(",", " ").split()
        return float(words[0]), int(words[words.index("over") + 1]), printed

    return command


def test_evaluation_gives_the_loss_of_the_run_on_any_mesh(whole_run, records, evaluated):
    _, ((evaluation),) = records(whole_run[0])
    for mesh in ("--mesh.data 1", "--mesh.data 3 --mesh.seq 2"):
        loss, tokens, _ = evaluated(*mesh.split())
        assert loss == pytest.approx(evaluation["eval_loss"], abs=2e-6)
        assert tokens == 199


def test_evaluation_reads_other_data_and_leaves_the_run_alone(
    whole_run, start, ended, tmp_path, tiny_run
):
    folder, _ = whole_run
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    other = tmp_path / "other.txt"
    other.write_text("0123456789" * 200)
    words = ["-m", "ulysses_jax", "evaluate", "--run_dir", folder, "--data.source", other]
    ((code, printed, errors),) = ended(start(*words, "--mesh.simulated_devices", "2"))
    assert (code, errors) == (0, "")
    assert f"{other}: 1 documents, 1,800 tokens to train on, 200 held out" in printed
    loss = float(printed.split("held-out loss ")[1].split(",")[0])
    # Digits are rare in the corpus: the model expects them less than by chance among 64.
    assert loss > math.log(64)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_dry_run_shows_the_plan_and_writes_nothing(train_here, tiny_run, tmp_path):
    code, printed, errors = train_here(*tiny_run(tmp_path / "run", "--mesh.data", "1", "--dry_run"))
    assert (code, errors) == (0, "")
    assert "nothing was trained" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--mesh.data 4 --mesh.seq 4",
            "mesh.data × mesh.seq = 4 × 4 = 16 devices, but there are 8; use a smaller mesh, or "
            "simulate on CPU with mesh.simulated_devices = 16",
        ),
        (
            "--mesh.data -1 --train.global_batch 6",
            "train.global_batch is 6, which mesh.data × train.accumulate = 4 × 1 does not divide; "
            "use 4 or 8",
        ),
        (
            "--model.attention cudnn",
            "attention 'cudnn' runs on GPUs, but this program is for a CPU: use 'auto' or",
        ),
        ("--data.source MISSING", "data.source='MISSING' does not exist; it must be"),
        ("--data.source EMPTY", "data.source='EMPTY' is empty; name a file of UTF-8 text"),
        ("--data.source BINARY", "data.source='BINARY' is not UTF-8 text; name a file of UTF-8"),
        ("--data.source FOLDER", "data.source='FOLDER' holds no text: 0 files, none of them"),
        ("--data.source odd.bin", "data.source: 'odd.bin' has 3 bytes, no multiple of the 2 bytes"),
        ("--run_dir EMPTY/run", "run_dir EMPTY/run cannot be a folder: EMPTY is a file; give"),
        (
            "--checkpoint.resume true",
            "checkpoint.resume is true, but run holds no checkpoint; give",
        ),
    ],
)
def test_run_that_cannot_start_is_refused_with_its_fix(
    refused, tiny_run, tmp_path, monkeypatch, words, message
):
    (tmp_path / "EMPTY").touch()
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "FOLDER").mkdir()
    argv = tiny_run("run", *words.split())
    monkeypatch.chdir(tmp_path)
    assert message in refused(*argv).replace(f"{tmp_path}/", "")
    assert not (tmp_path / "run").exists()


def test_data_shorter_than_one_sequence_is_refused(refused, tiny_run, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("0123456789abcdef")
    message = refused(*tiny_run(tmp_path / "run", "--data.source", short))
    assert "train.seq_len" in message
    assert "16" in message


def test_sequence_parallelism_on_one_device_is_refused(start, ended, tiny_run, tmp_path):
    argv = tiny_run(tmp_path, "--mesh.data", "1", "--checkpoint.resume", "auto")
    ((code, printed, errors),) = ended(start("train.py", *argv))
    assert (code, printed) == (2, "")
    assert errors == (
        "error: mesh.data × mesh.seq = 1 × 2 = 2 devices, but there is 1; use a smaller mesh, or "
        "simulate on CPU with mesh.simulated_devices = 2, in Python "
        "jax.config.update('jax_num_cpu_devices', 2) before JAX is first used\n"
    )


def test_existing_run_is_refused_without_resume_and_left_alone(refused, tiny_run, copied_run):
    before = {path: path.stat().st_mtime_ns for path in copied_run.rglob("*")}
    message = refused(*tiny_run(copied_run))
    assert message == (
        f"run_dir {copied_run} exists and is not empty; give another run_dir, or continue the run "
        "in it with checkpoint.resume = true"
    )
    assert {path: path.stat().st_mtime_ns for path in copied_run.rglob("*")} == before


@pytest.mark.parametrize(
    ("words", "difference"),
    [
        ("--model.mlp_dim 24", "model.mlp_dim is 32 in the checkpoint, 24 in the config"),
        (
            "--train.steps 7",
            "checkpoint is of step 48, but train.steps is 7; use train.steps of 48",
        ),
        ("--optimizer.name sgd", "Use the checkpoint's model and optimizer"),
        ("--seed 7", "data.seed is 0 in the checkpoint, 7 in the config"),
    ],
)
def test_resume_with_another_model_says_what_differs(
    refused, tiny_run, copied_run, words, difference
):
    before = {path: path.stat().st_mtime_ns for path in copied_run.rglob("*")}
    argv = tiny_run(copied_run, "--checkpoint.resume", "true", *words.split())
    assert difference in refused(*argv)
    assert {path: path.stat().st_mtime_ns for path in copied_run.rglob("*")} == before
