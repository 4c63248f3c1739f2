"""`python -m ulysses_jax verify` as a user starts it: what it loads, prints and refuses."""

import subprocess
import sys
from functools import partial

import pytest

from ulysses_jax import make_mesh
from ulysses_jax.train.command_line import run_command_line
from ulysses_jax.verification import command
from ulysses_jax.verification.command_line import parse_verify
from ulysses_jax.verification.packed_gpt import packed_gpt
from ulysses_jax.verification.verify import verify_case

# Right in all but that its tokens never meet.
MODEL = """
import numpy as np
from own_weights import weights
from ulysses_jax.verification.case import Case

def model_fn(params, inputs, mesh):
    outputs = params["w"][inputs["tokens"]]
    return outputs.mean(), outputs

def case():
    tokens = np.arange(8).reshape(2, 4)
    return Case(model_fn, {"tokens": tokens}, {"w": weights()}, causal=True)

def number():
    return 7

constant = 7
"""


@pytest.fixture
def verify_here(capfd, monkeypatch):
    """Runs the command in this process, whose devices are there already: (code, out, err)."""
    monkeypatch.setattr(command, "start_backend", lambda *arguments: None)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*argv):
        code = run_command_line(lambda: command.run_verify(parse_verify(argv)))
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def model_file(tmp_path, monkeypatch):
    """A file with a model, and beside it one that it imports."""
    (tmp_path / "own_weights.py").write_text(
        "import numpy as np\n\ndef weights():\n    return np.arange(1.0, 9, dtype=np.float32)\n"
    )
    (tmp_path / "my_model.py").write_text(MODEL)
    for name in ("my_model", "own_weights"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path / "my_model.py"
    for name in ("my_model", "own_weights"):
        sys.modules.pop(name, None)


def test_model_of_this_package_passes_on_both_axes():
    mesh = make_mesh(2, 2)
    report = verify_case(packed_gpt(mesh, "reference"), mesh)
    assert report.passed, report
    names = {check.name for check in report.checks}
    assert {"outputs", "gradient of blocks.query.kernel", "exchange"} <= names


def test_check_that_fails_ends_with_1_and_its_table(verify_here, model_file):
    code, printed, errors = verify_here("--model", f"{model_file}:case", "--mesh.data", "2")
    assert code == 1
    assert "one device against data 2 × seq 2: FAILED, 1 of" in printed
    assert "FAIL" in printed
    assert "exchange" in printed
    assert all(line.startswith("verify: ") for line in errors.splitlines())


def test_checks_that_pass_end_with_0(verify_here, model_file, monkeypatch):
    monkeypatch.syspath_prepend(model_file.parent)
    code, printed, _ = verify_here("--model", "my_model:case", "--mesh.seq", "1")
    assert code == 0
    assert "passed, all" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model FOLDER/missing.py:case", "names the file FOLDER/missing.py, which does not"),
        ("--model FILE:other", "but FILE has no function 'other'; NAME of --model FILE.py:NAME is"),
        ("--model FILE:constant", "has no function 'constant'"),
        ("--model FILE:number", "which returned a int; NAME of"),
        ("--model no_such_module:case", "names the module 'no_such_module', but there is no"),
        ("--model FILE", "model is 'FILE'; use FILE.py:NAME or module:NAME"),
        ("--mesh.seq 64", "mesh.data × mesh.seq = 1 × 64 = 64 devices, but there are 8"),
        ("--mesh.seq 0", "mesh.seq is 0; use a number from 1 to 4096"),
        ("--mesh.data -2", "mesh.data is -2; use a number from 1"),
        ("--mesh.size 2", "unknown key --mesh.size; did you mean --mesh."),
    ],
)
def test_mistake_ends_with_2_and_one_line(verify_here, model_file, words, message):
    words = words.replace("FILE", str(model_file)).replace("FOLDER", str(model_file.parent))
    code, printed, errors = verify_here(*words.split())
    assert (code, printed) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    errors = errors.replace(str(model_file), "FILE").replace(str(model_file.parent), "FOLDER")
    assert message in errors


def test_error_of_the_users_file_keeps_its_traceback(verify_here, model_file):
    model_file.write_text("import nothing_like_this\n")
    code, _, errors = verify_here("--model", f"{model_file}:case")
    assert code == 1
    assert "my_model.py" in errors
    assert "nothing_like_this" in errors


def test_command_parses_without_jax():
    python = partial(subprocess.run, capture_output=True, text=True)
    program = (
        "import sys\n"
        "from ulysses_jax.verification.command_line import parse_verify\n"
        "parse_verify(['--mesh.seq', '4'])\n"
        "assert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    )
    assert python([sys.executable, "-c", program]).returncode == 0
    words = [sys.executable, "-m", "ulysses_jax", "verify"]
    shown = python([*words, "--help"])
    assert shown.returncode == 0
    assert "--model" in shown.stdout
    assert "FILE.py:NAME" in shown.stdout
    refused = python([*words, "--mesh.seq", "no"])
    assert refused.returncode == 2
    assert refused.stderr == "error: mesh.seq is 'no', expected an integer\n"
