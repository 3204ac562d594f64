"""What the parser does beside argparse's: either spelling, any order, and advice that exists."""

import shlex

import pytest

from tinygpt import suggestions
from tinygpt.cli import main as cli
from tinygpt.cli.parser import hyphenated
from tinygpt.weights.config import DTYPES


def parsed(line: str) -> dict:
    return vars(cli.build_parser().parse_args(hyphenated(shlex.split(line))))


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("generate Once --max_tokens 5", "generate Once --max-tokens 5"),
        ("generate Once --max_tokens=5", "generate Once -n5"),
        ("generate --no_special_tokens Once", "generate Once --no-special-tokens"),
        ("generate -m demo -n 5 -t 2 -s 7 a b", "generate a b --model demo --max-tokens 5 --threads 2 --seed 7"),
        ("generate a -n 5 b --seed 7 c", "generate a b c -n 5 --seed 7"),
        ("generate a -n 5 -- --max_tokens", "generate -n 5 -- a --max_tokens"),
        ("generate -n 5 -5 degrees", "generate -n 5 -- -5 degrees"),
        ("generate --logit-bias 11=-4 a --logit-bias 13=2", "generate a --logit-bias 11=-4 --logit-bias 13=2"),
        ("generate a --seed -1 b", "generate a b --seed -1"),
        ("generate - -n 5", "generate -n 5 -"),
        ("generate a --overflow SLIDE --early-stopping Never", "generate a --overflow slide --early-stopping never"),
        ("generate a --device CPU --dtype Q8", "generate a --dtype int8"),
        ("generate a --dtype f32 --kv-cache-dtype BF16", "generate a --dtype float32 --kv-cache-dtype bfloat16"),
        ("eval ppl --stride 3 FILE", "eval --stride 3 ppl FILE"),
        ("eval Lambada FILE --dtype fp32,q4_0", "eval lambada FILE --dtype float32,int4"),
        ("convert SRC --dtype int8 DST", "convert SRC DST --dtype i8"),
        ("convert SRC DST --to GGUF", "convert SRC DST --to gguf"),
        ("serve --log-format JSON", "serve --log-format json"),
        ("bench --preset CPU-Study --format MD", "bench --preset cpu-study --format md"),
        ("bench --compare a b --format md", "bench --format md --compare a b"),
        ("info --json demo", "info demo --json"),
    ],
)
def test_a_line_may_be_written_otherwise(line, same):
    assert parsed(line) == parsed(same)


def test_every_advised_flag_and_command_exists():
    """Nearness in meaning is a table, written by hand."""
    commands = cli.build_parser().subparsers.choices
    flags = {flag: action for p in commands.values() for action in p._actions for flag in action.option_strings}
    for advised, others in suggestions.MEANT.items():
        flag, *value = advised.split()
        assert flag in flags
        assert not value or flags[flag].nargs is None
        for command, parser in commands.items():
            for other in others.split():
                nearest = suggestions.nearest_flag(other, parser.flags())
                assert nearest is None or nearest.split()[0] in parser.flags(), (command, other)
    for advised in suggestions.COMMANDS_MEANT:
        command, *more = advised.split()
        assert command in {*commands, "--version", "--help"}
        assert not more or parsed(f"{advised} FILE")


def test_what_no_command_has_is_no_flag_and_no_name_of_one():
    """Of all commands; a flag of one alone is told from others' names for it by which command is asked."""
    flags = {flag for parser in cli.build_parser().subparsers.choices.values() for flag in parser.flags()}
    reasons = [*suggestions.WITHOUT.values(), *suggestions.WITHOUT_IN_A_SHELL.values()]
    without = [flag for others in reasons for flag in others.split()]
    meant = {flag for others in suggestions.MEANT.values() for flag in others.split()}
    assert len({*without}) == len(without)
    assert not flags.intersection(without)
    assert not meant.intersection(without)
    arguments = {
        action.metavar for parser in cli.build_parser().subparsers.choices.values() for action in parser._actions
    }
    assert arguments.issuperset(suggestions.ARGUMENTS)


@pytest.mark.parametrize(
    ("typed", "flags", "nearest"),
    [
        ("--prompt", ["--soft-prompt", "--prompt-lookup-num-tokens", "--model"], "--prompt-lookup-num-tokens"),
        ("--prompt", ["--soft-prompt", "--model"], None),
        ("--n-predict", ["--max-tokens", "--n"], "--max-tokens"),
        ("--n-predict", ["--new-tokens"], "--new-tokens"),
        ("--lenght", ["--max-tokens"], "--max-tokens"),
        ("--temperatur", ["--temperature"], "--temperature"),
        ("--batch-size", ["--batch-sizes"], "--batch-sizes"),
        ("--batch-size", ["--max-num-seqs"], "--max-num-seqs"),
        ("--gpu", ["--device"], "--device cuda"),
        ("--frobnicate", ["--device", "--model"], None),
    ],
)
def test_what_is_near_in_meaning_comes_first(typed, flags, nearest):
    assert suggestions.nearest_flag(typed, flags) == nearest


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("Q4_K_M", "int4"),
        ("iq3_xxs", "int4"),
        ("q6_k", "int8"),
        ("fp8", "int8"),
        ("torch.float16", "bfloat16"),
        ("<class 'numpy.float64'>", "float32"),
        ("flaot32", "float32"),
        ("load_in_4bit", "int4"),
        ("None", None),
        ("complex64", None),
    ],
)
def test_other_precisions_are_near_to_one_of_ours(typed, nearest):
    assert suggestions.nearest_dtype(typed, DTYPES) == nearest
    assert suggestions.nearest_dtype(typed, ["auto"]) is None


@pytest.mark.parametrize(
    ("line", "prompt"),
    [("generate -n 2 -- -ngl 99", ["-ngl", "99"]), ("generate Once -n 2 -- -temp", ["Once", "-temp"])],
)
def test_no_word_behind_two_dashes_is_a_foreign_flag(line, prompt):
    assert parsed(line)["prompt"] == prompt


def test_a_value_that_looks_like_a_foreign_flag_is_said_to_begin_with_a_dash(capsys):
    with pytest.raises(SystemExit):
        parsed("generate Once --stop -ngl")
    error = capsys.readouterr().err
    assert "--stop needs a value, --stop TEXT: " in error
    assert "a value that begins with a dash is written --stop=-ngl" in error
    assert "unrecognized" not in error


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_has_two_tiers(command, capsys):
    shown = {}
    for words in ([command, "--help"], [command, "--help-all"], ["help", command]):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 0
        shown[words[-1]] = capsys.readouterr().out
    assert shown["--help"] == shown[command]
    parser = cli.build_parser().subparsers.choices[command]
    assert all(flag in shown["--help-all"] for flag in parser.flags())
    assert len(shown["--help"]) <= len(shown["--help-all"])


def mistyped(flag: str) -> list[str]:
    """The flag without one of its letters, and with two neighbours swapped."""
    inner = range(3, len(flag) - 1)
    without = [flag[:i] + flag[i + 1 :] for i in inner]
    swapped = [flag[:i] + flag[i + 1] + flag[i] + flag[i + 2 :] for i in inner if flag[i] != flag[i + 1]]
    return [typed for typed in without + swapped if not typed.endswith("-")]


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_mistyped_flag_is_known_in_every_command(command):
    flags = [flag for flag in cli.build_parser().subparsers.choices[command].flags() if len(flag) > 5]
    typed = {word: flag for flag in flags for word in mistyped(flag) if word not in flags}
    wrong = {word: suggestions.nearest_flag(word, flags) for word, flag in typed.items()}
    wrong = {word: nearest for word, nearest in wrong.items() if nearest != typed[word]}
    assert wrong == {}
