"""Flags of `generate`: each is its field, with the default of the contract, and reaches the model."""

import re
from dataclasses import fields

import pytest

from tinygpt import SamplingParams
from tinygpt.cli import main as cli
from tinygpt.cli.flags import sampling

PROMPT = ["Once", "upon", "a", "time"]
# A function and an array have no place on a command line; soft_prompt is a flag that loads it too.
NOT_FLAGS = ("logits_processors", "prompt_embeds", "soft_prompt")


def test_defaults_are_the_contract():
    args = vars(cli.build_parser().parse_args(["generate", *PROMPT]))
    own = {field.name: field.default for field in fields(SamplingParams)}
    assert args == {
        **{name: default for name, default in own.items() if name not in NOT_FLAGS},
        "command": "generate",
        "prompt": PROMPT,
        "prompt_text": None,
        "file": None,
        "model": "demo",
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "device": "cpu",
        "threads": None,
        "max_num_seqs": 32,
        "max_model_len": None,
        "max_num_batched_tokens": None,
        "prefix_cache_seqs": 4,
        "draft_model": None,
        "num_speculative_tokens": 4,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "split_special_tokens": False,
        "lora": None,
        "soft_prompt": None,
        "interactive": False,
        "workers": 1,
        "ray": False,
        "keep_order": False,
        "max_tokens": 128,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "seed": None,
        "n": 1,
        "stop": None,
        "ignore_eos": False,
        "input": None,
        "output": None,
        "json": False,
        "no_stream": False,
        "echo": False,
        "debug": False,
    }


def test_help_shows_the_default_of_every_flag(run):
    result = run("--help-all")
    assert result.code == 0
    described = re.split(r"\n  (?=-|PROMPT)", result.out.split("positional arguments:")[1])
    flags = {text.split()[0]: " ".join(text.split()) for text in described[1:]}
    assert len(flags) > 60
    assert [flag for flag, text in flags.items() if "(default: " not in text] == ["-h,", "--help-all"]


def test_help_shows_the_flags_of_every_day(run):
    flag = re.compile(r"^  (?:-\w (?:\w+)?, )?(--[\w-]+)", re.MULTILINE)
    shown, all_of_them = ({*flag.findall(run(tier).out)} for tier in ("--help", "--help-all"))
    assert shown >= {"--prompt", "--max-tokens", "--temperature", "--model", "--dtype", "--input", "--output"}
    assert 18 <= len(shown) <= 24
    assert shown < all_of_them
    (count,) = re.findall(r"--help-all shows (\d+) more flags", run("--help").out)
    assert int(count) == len(all_of_them) - len(shown)
    assert "--guided-*" in run("--help").out


FLAGS = {
    "--best-of 3 --temperature 1": {"best_of": 3, "temperature": 1.0},
    "--include-stop-str-in-output --stop e": {"include_stop_str_in_output": True, "stop": ("e",)},
    "--stop-token-ids 11,13": {"stop_token_ids": (11, 13)},
    "--eos-token-id 11": {"eos_token_id": (11,)},
    "--min-tokens 3 --max-time 60": {"min_tokens": 3, "max_time": 60.0},
    "--repetition-detection 2,3": {"repetition_detection": {"max_pattern_size": 2, "min_count": 3}},
    "--repetition-detection 4,3,2": {
        "repetition_detection": {"max_pattern_size": 4, "min_count": 3, "min_pattern_size": 2}
    },
    "--logit-bias 11=-4 --logit-bias 13=2.5": {"logit_bias": {11: -4.0, 13: 2.5}},
    "--repetition-penalty 1.3 --frequency-penalty -0.5 --presence-penalty 1": {
        "repetition_penalty": 1.3,
        "frequency_penalty": -0.5,
        "presence_penalty": 1.0,
    },
    "--no-repeat-ngram-size 2": {"no_repeat_ngram_size": 2},
    "--bad-words the --bad-words and --bad-words-ids 11,12 --bad-words-ids 13": {
        "bad_words": ("the", "and"),
        "bad_words_ids": ((11, 12), (13,)),
    },
    "--allowed-token-ids 11,13,15 --suppress-tokens 13": {"allowed_token_ids": (11, 13, 15), "suppress_tokens": (13,)},
    "--top-p-rule openai --top-p-decay 0.9 --top-p-min 0.1 --top-p-reset-ids 11": {
        "top_p_rule": "openai",
        "top_p_decay": 0.9,
        "top_p_min": 0.1,
        "top_p_reset_ids": (11,),
    },
    "--min-p 0.1 --typical-p 0.9": {"min_p": 0.1, "typical_p": 0.9},
    "--epsilon-cutoff 0.001 --eta-cutoff 0.002": {"epsilon_cutoff": 0.001, "eta_cutoff": 0.002},
    "--temperature 0 --num-beams 4 --length-penalty 2 --early-stopping never": {
        "temperature": 0.0,
        "num_beams": 4,
        "length_penalty": 2.0,
        "early_stopping": "never",
    },
    "--temperature 0 --num-beams 4 --num-beam-groups 2 --diversity-penalty 0.5 --early-stopping true": {
        "temperature": 0.0,
        "num_beams": 4,
        "num_beam_groups": 2,
        "diversity_penalty": 0.5,
        "early_stopping": True,
    },
    "--prompt-lookup-num-tokens 3 --max-matching-ngram-size 1": {
        "prompt_lookup_num_tokens": 3,
        "max_matching_ngram_size": 1,
    },
    "--guided-choice yes --guided-choice no": {"guided_choice": ["yes", "no"]},
    "--guided-regex [a-z]+": {"guided_regex": "[a-z]+"},
    '--guided-json {"type":"integer"}': {"guided_json": {"type": "integer"}},
    "--guided-grammar start:/a+/": {"guided_grammar": "start:/a+/"},
    "--overflow slide --stride 9": {"overflow": "slide", "stride": 9},
    "--logprobs 2 --prompt-logprobs 1 --logprobs-mode processed": {
        "logprobs": 2,
        "prompt_logprobs": 1,
        "logprobs_mode": "processed",
    },
}


def test_every_field_has_a_flag_that_is_tried():
    plain = {"max_tokens", "temperature", "top_k", "top_p", "seed", "n", "stop", "ignore_eos"}
    tried = plain.union(*FLAGS.values())
    assert tried == {field.name for field in fields(SamplingParams)} - set(NOT_FLAGS)


@pytest.mark.parametrize("arguments", FLAGS)
def test_a_flag_is_its_field(arguments):
    args = cli.build_parser().parse_args(["generate", *arguments.split()])
    base = {"max_tokens": 128, "temperature": 0.8, "top_k": 40, "top_p": 0.95}
    assert sampling.params_of(args) == SamplingParams(**{**base, **FLAGS[arguments]})


def test_what_a_name_of_other_programs_means_is_said_of_weights_and_of_the_cache(capsys):
    said = {"--dtype": "a byte a weight", "--kv-cache-dtype": "a byte for each number of keys and values, with"}
    for flag, meaning in said.items():
        args = cli.build_parser().parse_args(["generate", "Once", flag, "q8_0"])
        assert (args.dtype if flag == "--dtype" else args.kv_cache_dtype) == "int8"
        assert capsys.readouterr().err.startswith(f"tinygpt: q8_0 is taken for int8: {meaning}")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("fp8", "it is 'fp8' and must be one of auto, float32, bfloat16, int8: did you mean int8?"),
        ("f16", "it is 'f16', a precision that is not here: give bfloat16, which is as small, or one of auto, "),
        ("x", "it is 'x' and must be one of auto, float32, bfloat16, int8.\n"),
    ],
)
def test_a_dtype_that_no_cache_has(capsys, given, says):
    with pytest.raises(SystemExit):
        cli.build_parser().parse_args(["generate", "Once", "--kv-cache-dtype", given])
    assert f"--kv-cache-dtype {says.removeprefix('it ')}" in capsys.readouterr().err


def test_the_flags_of_the_model_reach_it(run, monkeypatch):
    given = {}

    def stop(**arguments):
        given.update(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr("tinygpt.llm.LLM", stop)
    flags = "--max-num-seqs 3 --max-num-batched-tokens 9 --prefix-cache-seqs 2 --max-model-len 64 --lora a"
    more = "--soft-prompt n=p=q --draft-model d --num-speculative-tokens 7 --dtype int8 --kv-cache-dtype float32"
    assert run(f"Once --threads 1 --no-special-tokens {flags} {more}").code == cli.INTERRUPTED
    assert given == {
        "model": "demo",
        "dtype": "int8",
        "device": "cpu",
        "threads": 1,
        "max_num_seqs": 3,
        "max_model_len": 64,
        "kv_cache_dtype": "float32",
        "max_num_batched_tokens": 9,
        "prefix_cache_seqs": 2,
        "draft_model": "d",
        "num_speculative_tokens": 7,
        "tensor_parallel_size": 1,  # another number would start processes: parallel/test_mpi.py
        "pipeline_parallel_size": 1,
        "split_special_tokens": True,
        "lora": "a",
        "soft_prompts": {"n": "p=q"},
    }
