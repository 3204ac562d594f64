"""Values of flags from the command line, the environment, a file, and our defaults, in this order; other names."""

import sys

import pytest

from tinygpt.cli import main as cli
from tinygpt.cli.flags import params_of


@pytest.fixture
def config(tmp_path):
    def write(text: str, name: str = "config.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_the_nearest_source_of_a_value_holds(config, monkeypatch):
    words = ["serve", "--config", config("model: of-file\nport: 1\ndtype: int4\nmax-num-seqs: 3")]
    monkeypatch.setenv("TINYGPT_MODEL", "of-environment")
    monkeypatch.setenv("TINYGPT_PORT", "2")
    args = cli.parse([*words, "--port", "3"])
    found = (args.model, args.port, args.dtype, args.max_num_seqs, args.max_queue)
    assert found == ("of-environment", 3, "int4", 3, 512)
    assert cli.parse([*words, "of-line"]).model == "of-line"


def test_variables_of_each_command(monkeypatch):
    values = {"MODEL": "m", "HOST": "0.0.0.0", "PORT": "1", "DTYPE": "BF16", "THREADS": "2", "LOG": "error"}
    for name, value in values.items():
        monkeypatch.setenv(f"TINYGPT_{name}", value)
    serve = cli.parse(["serve"])
    assert (serve.host, serve.port, serve.log_level) == ("0.0.0.0", 1, "error")
    for words in (["serve"], ["generate"], ["warmup"], ["eval", "ppl", "file"], ["doctor"]):
        args = cli.parse(words)
        assert (args.model, args.threads) == ("m", 2)
    bench = cli.parse(["bench"])
    assert (bench.model, bench.dtype, bench.threads) == ("m", ("bfloat16",), (2,))
    assert cli.parse(["convert", "a", "b"]).model is None


FILE = """
temp: 0.5
stop: [a, b]
ignore-eos: true
echo: false
logit_bias: 11=-4
guided_json: {type: object, title: 2020-01-01}
seed: null
gpu-memory-utilization: 0.9
"""


DATED = '{"type": "object", "title": "2020-01-01"}'


def test_a_file_has_values_of_every_kind(config):
    args = cli.parse(["generate", "x", "--config", config(FILE)])
    params = params_of(args)
    assert (params.temperature, params.stop, params.ignore_eos, args.echo) == (0.5, ("a", "b"), True, False)
    assert (params.logit_bias, params.guided_json, params.seed) == (((11, -4.0),), DATED, None)
    assert cli.parse(["generate", "--config", config(FILE), "--stop", "c"]).stop == ["c"]
    bench = cli.parse(["bench", "--config", config("batch-sizes: [1, 4]\nnew-tokens: 8")])
    assert (bench.batch_sizes, bench.new_tokens) == ((1, 4), (8,))
    serve = cli.parse(["serve", "--config", config("allowed-hosts: [a, b]")])
    assert serve.allowed_hosts == ["a", "b"]


def test_a_file_needs_yaml(call, config, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    result = call("generate", "--config", config("model: m"))
    assert result.code == 2
    assert "config.yaml cannot be read: import of yaml" in result.err


def test_a_wrong_variable_is_a_usage_error(call, monkeypatch):
    monkeypatch.setenv("TINYGPT_THREADS", "all")
    assert "TINYGPT_THREADS: argument -t/--threads: invalid int value: 'all'" in call("generate", "x").err


@pytest.mark.parametrize("quiet", [["-q"], ["--log-level", "error"], []])
def test_quiet(call, quiet, monkeypatch):
    result = call("generate", "Once", "--max-tokens", "2", "-ngl", "3", *quiet)
    assert result.code == 0
    assert bool(result.out)
    assert (result.err == "") == bool(quiet)
    assert ("nothing here depends on -ngl" in result.err) == (not quiet)


def test_a_shell_completes_commands_and_flags(call):
    shtab = pytest.importorskip("shtab")
    result = call("completion", "bash")
    assert (result.code, result.err) == (0, ""), shtab
    assert {"generate", "serve", "--max-tokens", "--batch-sizes"} <= {*result.out.replace("'", " ").split()}


ALIASES = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9 if i else 'x')}]\n" for i in range(20))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ALIASES, "aliases have too many values"),
        ("guided-json: &a {x: *a}", "Circular reference"),
        (f"seed: 0x{'f' * 9000}", "Exceeds the limit"),
        ("#" * 1_048_577, "more than 1048576 characters"),
    ],
    ids=range(4),
)
def test_a_hostile_file_is_a_usage_error(call, config, text, said):
    result = call("generate", "--config", config(text))
    assert (result.code, said in result.err) == (2, True)


@pytest.mark.parametrize(
    "words", [["--config", '"\\e[31mred": 1'], ["--b\x1b[31mx"], ["--config", "\x1b[31m"]]
)
def test_errors_do_not_steer_a_terminal(call, config, words):
    if ":" in words[-1]:
        words = [words[0], config(words[1])]
    result = call("generate", *words)
    assert result.code == 2
    assert "\\x1b[31m" in result.err
    assert "\x1b" not in result.err


@pytest.mark.parametrize(
    ("words", "dtype", "max_tokens", "n"),
    [
        ("--fp16", "float16", 128, 1),
        ("--fp16=False", "auto", 128, 1),
        ("--load-in-8bit True", "int8", 128, 1),
        ("-n5 -l 20", "auto", 20, 5),
        ("-l=20 -n 5", "auto", 20, 5),
    ],
)
def test_values_of_other_programs_flags(words, dtype, max_tokens, n):
    args = cli.parse(["generate", "x", *words.split()])
    assert (args.prompt, args.dtype, args.max_tokens, args.n) == (["x"], dtype, max_tokens, n)
