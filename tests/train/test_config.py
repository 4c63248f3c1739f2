"""Config files and command lines give the run they say, or one message that says what to mend."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ulysses_jax.train.command_line import (
    load,
    parse,
    parse_evaluate,
    parse_generate,
    run_command_line,
    to_yaml,
)
from ulysses_jax.train.config import Config, ConfigError, DataConfig, MeshConfig, OptimizerConfig
from ulysses_jax.train.parsing import leaves_of, read_yaml

CONFIGS = Path(__file__).parents[2] / "configs"

FILE_TEXT = """
mesh: {data: 2, seq: 4, simulated_devices: 8}
train:
  seq_len: 64
  steps: 7
optimizer:
  learning_rate: 3e-4
run_dir: from_file
"""

OVERRIDES = {
    "mesh.seq": "2",
    "model.dtype": "bfloat16",
    "model.num_kv_heads": "null",
    "train.seq_len": "32",
    "train.steps": "11",
    "optimizer.learning_rate": "1e-3",
    "data.document_mask": "true",
    "checkpoint.resume": "auto",
    "run_dir": "3",
}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(FILE_TEXT)
    return path


def message_of(argv, parse_arguments=parse):
    with pytest.raises(ConfigError) as caught:
        parse_arguments(argv)
    message = str(caught.value)
    assert "\n" not in message
    assert "usage" not in message
    return message


def test_no_arguments_give_the_defaults():
    assert parse([]) == Config()


def test_file_sets_its_keys_and_leaves_the_others(config_file):
    config = parse(["--config", str(config_file)])
    assert config.mesh == MeshConfig(data=2, seq=4, simulated_devices=8)
    assert config.optimizer == OptimizerConfig(learning_rate=3e-4)
    assert config.run_dir == "from_file"


@given(
    keys=st.sets(st.sampled_from(sorted(OVERRIDES))),
    before=st.sets(st.sampled_from(sorted(OVERRIDES))),
    equals=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_override_wins_on_either_side_of_config(config_file, keys, before, equals):
    def words(chosen):
        pairs = [(f"--{key}", OVERRIDES[key]) for key in sorted(chosen)]
        return [f"{k}={v}" for k, v in pairs] if equals else [word for p in pairs for word in p]

    config = ["--config", str(config_file)]
    everything_after = parse([*config, *words(keys)])
    assert parse([*words(keys & before), *config, *words(keys - before)]) == everything_after
    for key in keys & {"mesh.seq", "train.seq_len", "train.steps"}:
        group, name = key.split(".")
        assert getattr(getattr(everything_after, group), name) == int(OVERRIDES[key])


def test_later_file_and_later_override_win(config_file, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text("train: {steps: 13}")
    config = parse(["--train.seq_len=4", f"--config={config_file}", f"--config={other}"])
    assert (config.train.steps, config.train.seq_len, config.mesh.seq) == (13, 4, 4)
    assert parse(["--train.steps", "5", "--train.steps", "6"]).train.steps == 6


def test_boolean_key_needs_no_value():
    assert parse(["--dry_run", "--data.document_mask", "--seed", "3"]) == Config(
        dry_run=True, data=DataConfig(document_mask=True), seed=3
    )
    assert not parse(["--dry_run", "false"]).dry_run


@pytest.mark.parametrize(("text", "resume"), [("true", True), ("false", False), ("auto", "auto")])
def test_resume_is_true_false_or_auto(text, resume):
    assert parse(["--checkpoint.resume", text]).checkpoint.resume is resume


def test_numbers_may_be_negative_or_in_exponent_form():
    config = parse(["--mesh.data", "-1", "--optimizer.eps", "1e-12"])
    assert (config.mesh.data, config.optimizer.eps) == (-1, 1e-12)


@given(
    run_dir=st.one_of(
        st.sampled_from(["1e-3", "null", "true", "2024-01-01", "3", "a: b", "é #", "~", "- x"]),
        st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1).filter(
            str.strip
        ),
    ),
    learning_rate=st.floats(1e-30, 1e30),
    seed=st.integers(0, 2**32 - 1),
    kv_heads=st.sampled_from([None, 1, 8]),
    resume=st.sampled_from([True, False, "auto"]),
)
@settings(max_examples=20, deadline=None)
def test_written_config_reads_back_equal(
    tmp_path_factory, run_dir, learning_rate, seed, kv_heads, resume
):
    config = Config(
        run_dir=run_dir,
        seed=seed,
        optimizer=OptimizerConfig(learning_rate=learning_rate),
        model=dataclasses.replace(Config().model, num_kv_heads=kv_heads),
        checkpoint=dataclasses.replace(Config().checkpoint, resume=resume),
    )
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load(path) == config


def test_printed_config_can_be_fed_back(config_file, tmp_path, capsys):
    arguments = ["--config", str(config_file), "--train.steps", "5"]
    with pytest.raises(SystemExit) as ended:
        parse([*arguments, "--print_config"])
    assert ended.value.code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load(printed) == parse(arguments)


def test_help_explains_every_key(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    entries = capsys.readouterr().out.split("\n  --")
    explained = {
        entry.split()[0] for entry in entries if len(entry.split("(type:")[0].split()) >= 4
    }
    assert set(leaves_of(Config)) <= explained


def test_parsing_imports_no_jax():
    program = (
        "import sys\n"
        "from ulysses_jax.train.command_line import parse, to_yaml\n"
        "to_yaml(parse(['--train.steps', '3']))\n"
        "assert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_config_is_valid_and_says_what_it_is(path):
    config = load(path)
    assert path.read_text().startswith("# ")
    assert Path(config.run_dir).name == path.stem
    devices = config.mesh.data * config.mesh.seq
    parse(["--mesh.simulated_devices", str(devices), "--config", str(path), "--dry_run"])


@pytest.mark.parametrize(
    ("stem", "data", "seq", "seq_len"),
    [
        ("gpt_1.2b_32k_8gpu", 1, 8, 2**15),
        ("gpt_1.2b_128k_32gpu", 1, 32, 2**17),
        ("gpt_1.2b_256k_64gpu", 2, 32, 2**18),
        ("gpt_1.2b_1m_256gpu", 8, 32, 2**20),
        ("gpt_7b_128k_32gpu", 1, 32, 2**17),
        ("gpt_30b_128k_64gpu", 1, 64, 2**17),
    ],
)
def test_papers_runs_have_the_papers_mesh_and_length(stem, data, seq, seq_len):
    config = load(CONFIGS / f"{stem}.yaml")
    assert (config.mesh.data, config.mesh.seq, config.train.seq_len) == (data, seq, seq_len)
    assert (config.model.dtype, config.train.zero_stage) == ("bfloat16", 3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--train.step", "3"], "unknown key --train.step; did you mean --train.steps?"),
        (["--steps=3"], "unknown key --steps; did you mean --train.steps?"),
        (["--mesh.sq", "3"], "unknown key --mesh.sq; did you mean --mesh.seq?"),
        (["--conf", "x"], "unknown key --conf; did you mean --config?"),
        (["--mesh", "{data: 3}"], "unknown key --mesh; did you mean --mesh.seq?"),
        (["stray"], "'stray' belongs to no key; write --KEY VALUE"),
        (["--train.steps"], "--train.steps has no value, expected an integer"),
        (["--seed", "--dry_run"], "--seed has no value, expected an integer"),
        (["--config"], "--config has no value, expected a YAML file"),
        (["--print_config=all"], "--print_config takes no value, but 'all' was given"),
        (["--train.steps", "many"], "train.steps is 'many', expected an integer"),
        (["--train.steps", "2.5"], "train.steps is '2.5', expected an integer"),
        (["--train.steps", "true"], "train.steps is 'true', expected an integer"),
        (["--optimizer.eps", "true"], "optimizer.eps is 'true', expected a number"),
        (["--dry_run", "3"], "dry_run is '3', expected true or false"),
        (["--train.remat", "some"], "train.remat is 'some', expected one of none, full, exchange"),
        (["--model.num_heads", "x"], "model.num_heads is 'x', expected an integer or null"),
        (["--checkpoint.resume", "3"], "checkpoint.resume is '3', expected true or false or auto"),
    ],
)
def test_wrong_command_line_is_refused_with_its_fix(argv, message):
    assert message_of(argv) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; it must hold keys of --help"),
        (b"# only a comment\n", "is empty; it must hold keys of --help"),
        (b"- 1\n- 2\n", "holds ['1', '2'], expected a mapping with keys of: mesh, model, data"),
        (b"just words", "holds 'just words', expected a mapping"),
        (b"\xff\xfe\x00\x81", "is not UTF-8 text; use a YAML file"),
        (b"\x00\x01\x02", "is not YAML"),
        (b"[" * 500, "is not YAML"),
        (b"a: b: c", "line 1: mapping values are not allowed here"),
        (b"---\nseed: 1\n---\nseed: 2\n", "line 3: but found another document"),
        (b"seed: 1\nseed: 2\n", "line 2: the key 'seed' is given twice"),
        (b"train:\n  steps: 1\n  steps: 2\n", "line 3: the key 'steps' is given twice"),
        (b"train:\n  step: 3\n", "unknown key train.step; did you mean train.steps?"),
        (b"trian:\n  steps: 3\n", "unknown key trian; did you mean train?"),
        (b"steps: 3\n", "unknown key steps; did you mean train.steps?"),
        (b"train.steps: 3\n", "train.steps must be nested; write train: {steps: '3'}"),
        (b"train:\n", "train in config file"),
        (b"train: 3\n", "holds '3', expected a mapping with keys of: seq_len, global_batch"),
        (b"train: {steps: [1]}\n", "train.steps is ['1'], expected an integer"),
        (b"seed: {a: 1}\n", "seed is {'a': '1'}, expected an integer"),
        (b"run_dir: [a]\n", "run_dir is ['a'], expected text"),
        (b"? [1]\n: 2\n", "found unhashable key"),
    ],
)
def test_wrong_file_is_refused_with_its_fix(tmp_path, content, message):
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    assert message in message_of(["--config", str(path)])


def test_file_that_cannot_be_read_is_named(tmp_path):
    missing = str(tmp_path / "missing.yaml")
    assert message_of(["--config", missing]) == (
        f"config file {missing!r} cannot be read: No such file or directory"
    )
    assert "Is a directory" in message_of(["--config", str(tmp_path)])
    assert "cannot be read" in message_of(["--config", "a\0b"])


@given(content=st.one_of(st.binary(max_size=40), st.text("az:-{[]},&*!|>'\"# \n", max_size=40)))
@settings(max_examples=200, deadline=None)
def test_any_file_gives_values_or_one_message(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "junk.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = ""
    try:
        assert read_yaml(str(path), Config) == {}
    except ConfigError as error:
        message = str(error)
    assert "\n" not in message


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    data = DataConfig(source="corpus.txt", heldout_tokens=17, document_end=3)
    (folder / "config.yaml").write_text(to_yaml(Config(data=data)))
    return str(folder)


def test_evaluate_takes_what_is_not_given_from_the_run(run_dir):
    config = parse_evaluate(["--run_dir", run_dir])
    assert config.data == DataConfig(source="corpus.txt", heldout_tokens=17, document_end=3)
    assert config.mesh == MeshConfig(data=1, seq=1)
    config = parse_evaluate(["--data.source", "b", "--mesh.seq=2", "--run_dir", run_dir])
    # The token that ends the documents of the run's .bin ends none of a text.
    assert config.data == DataConfig(source="b", heldout_tokens=17, document_end=None)
    assert config.mesh == MeshConfig(data=1, seq=2)


def test_generate_reads_its_keys():
    words = "--run_dir r --tokens 5 --temperature 0 --seed 3 --prompt=--x"
    config = parse_generate(words.split())
    assert dataclasses.astuple(config) == ("r", "--x", 5, 0.0, 3)


@pytest.mark.parametrize(
    ("parse_arguments", "argv", "message"),
    [
        (parse_generate, "--prompt a", "--run_dir is missing, expected text"),
        (parse_generate, "--run_dir r --prompt a --tokens 0", "tokens is 0; use 1 or more"),
        (parse_generate, "--run_dir r --prompt a --tokens x", "tokens is 'x', expected an integer"),
        (parse_generate, "--run_dir r --token 3", "unknown key --token; did you mean --tokens?"),
        (parse_generate, "--run_dir r --prompt a --temperature -1", "temperature is -1.0; use"),
        (parse_evaluate, "--data.source a", "--run_dir is missing, expected text"),
        (parse_evaluate, "--run_dir nowhere", "config file 'nowhere/config.yaml' cannot be read"),
        (parse_evaluate, "--run_dir r --config x", "unknown key --config; did you mean"),
        (parse_evaluate, "--run_dir RUN --mesh.seq 3", "train.seq_len is 512, which mesh.seq = 3"),
        (parse_evaluate, "--run_dir RUN --mesh.data 2.5", "mesh.data is '2.5', expected an"),
    ],
)
def test_wrong_subcommand_is_refused_with_its_fix(run_dir, parse_arguments, argv, message):
    words = [run_dir if word == "RUN" else word for word in argv.split()]
    assert message_of(words, parse_arguments).startswith(message)


@pytest.mark.parametrize("parse_arguments", [parse_generate, parse_evaluate])
def test_subcommand_help_needs_no_run(parse_arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["-h"])
    assert ended.value.code == 0
    assert "--run_dir" in capsys.readouterr().out


def raise_error(error):
    raise error


@pytest.mark.parametrize(
    ("command", "code", "stderr"),
    [
        (lambda: parse(["--seed", "-1"]), 2, "error: seed is -1; use a number from 0 to"),
        (lambda: raise_error(KeyboardInterrupt()), 130, "interrupted\n"),
        (lambda: None, 0, ""),
        (lambda: 3, 3, ""),
    ],
)
def test_command_ends_with_code_and_one_line(command, code, stderr, capsys):
    assert run_command_line(command) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(stderr)
    assert captured.err.count("\n") == bool(stderr)
    assert captured.out == ""


@pytest.mark.parametrize("error", [TypeError("of ours"), ValueError("of a library")])
def test_mistakes_of_the_program_keep_their_traceback(error, capsys):
    assert run_command_line(lambda: raise_error(error)) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert str(error) in printed


def test_every_key_of_the_defaults_is_in_the_written_config():
    tree = yaml.safe_load(to_yaml(Config()))
    assert tree == dataclasses.asdict(Config())
