"""Flags of `generate`: each is its field, with the default of the README, and reaches the model."""

import re
from dataclasses import fields

import pytest

from support.paths import ROOT
from tinygpt import SamplingParams
from tinygpt.cli import flags
from tinygpt.cli import main as cli
from tinygpt.llm_args import LLMArgs
from tinygpt.sampling_params import RepetitionDetection

# A function and an array have no place on a command line; --soft-prompt loads a soft prompt and selects it.
NOT_FLAGS = ("logits_processors", "prompt_embeds", "soft_prompt", "capture", "edits")
BASE = {"max_tokens": 128, "temperature": 0.8, "top_k": 40, "top_p": 0.95}


def parse(*words: str):
    return cli.parse(["generate", *words])


def test_help_shows_the_default_of_every_flag(run):
    described = re.split(r"\n  (?=-|PROMPT)", run("--help-all").out.split("positional arguments:")[1])
    flags = {text.split()[0]: " ".join(text.split()) for text in described[1:]}
    assert len(flags) > 60
    assert [flag for flag, text in flags.items() if "(default: " not in text] == ["-h,", "--help-all"]


def test_help_shows_the_flags_of_every_day(run):
    flag = re.compile(r"^  (?:-\w(?: \w+)?, )?(--[\w-]+)", re.MULTILINE)
    shown, all_of_them = ({*flag.findall(run(tier).out)} for tier in ("--help", "--help-all"))
    assert shown >= {"--prompt", "--max-tokens", "--temperature", "--model", "--dtype", "--input", "--output"}
    assert 18 <= len(shown) <= 24
    assert shown < all_of_them
    (count,) = re.findall(r"--help-all shows (\d+) more flags", run("--help").out)
    assert int(count) == len(all_of_them) - len(shown)


@pytest.mark.parametrize("prompt", ["-- my_name is", "--my_name is", "snake_case"])
def test_a_prompt_keeps_its_underscores(prompt):
    assert parse(prompt, "--max_tokens=3").prompt == [prompt]


FLAGS = [
    ("--max-tokens 9 --seed 3 --n 2 --ignore-eos", {"max_tokens": 9, "seed": 3, "n": 2, "ignore_eos": True}),
    ("--top-k 3 --top-p 0.5 --temperature 2", {"top_k": 3, "top_p": 0.5, "temperature": 2.0}),
    ("--best-of 3 --temperature 1", {"best_of": 3, "temperature": 1.0}),
    ("--include-stop-str-in-output --stop e", {"include_stop_str_in_output": True, "stop": ("e",)}),
    ("--stop-token-ids 11,13 --eos-token-id 11", {"stop_token_ids": (11, 13), "eos_token_id": (11,)}),
    ("--min-tokens 3 --max-time 60", {"min_tokens": 3, "max_time": 60.0}),
    ("--repetition-detection 2,3", {"repetition_detection": {"max_pattern_size": 2, "min_count": 3}}),
    ("--repetition-detection 4,3,2", {"repetition_detection": RepetitionDetection(4, 3, 2)}),
    ("--logit-bias 11=-4 --logit-bias 13=2.5", {"logit_bias": {11: -4.0, 13: 2.5}}),
    (
        "--repetition-penalty 1.3 --min-p 0.1 --typical-p 0.9",
        {"repetition_penalty": 1.3, "min_p": 0.1, "typical_p": 0.9},
    ),
    ("--frequency-penalty -0.5 --presence-penalty 1", {"frequency_penalty": -0.5, "presence_penalty": 1.0}),
    ("--no-repeat-ngram-size 2 --suppress-tokens 13", {"no_repeat_ngram_size": 2, "suppress_tokens": (13,)}),
    ("--bad-words the --bad-words and", {"bad_words": ("the", "and")}),
    ("--bad-words-ids 11,12 --bad-words-ids 13", {"bad_words_ids": ((11, 12), (13,))}),
    ("--allowed-token-ids 11,13,15", {"allowed_token_ids": (11, 13, 15)}),
    ("--top-p-rule openai --top-p-decay 0.9", {"top_p_rule": "openai", "top_p_decay": 0.9}),
    ("--top-p-min 0.1 --top-p-reset-ids 11", {"top_p_min": 0.1, "top_p_reset_ids": (11,)}),
    ("--epsilon-cutoff 0.001 --eta-cutoff 0.002", {"epsilon_cutoff": 0.001, "eta_cutoff": 0.002}),
    (
        "--dry-multiplier 0.8 --dry-base 2 --dry-allowed-length 3",
        {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3},
    ),
    (
        "--dry-penalty-last-n -1 --dry-sequence-breaker a --dry-sequence-breakers b",
        {"dry_penalty_last_n": -1, "dry_sequence_breakers": ("a", "b")},
    ),
    (
        "--top-nsigma 1.5 --xtc-probability 0.5 --xtc-threshold 0.2",
        {"top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.2},
    ),
    (
        "--temperature 0 --num-beams 4 --length-penalty 2 --early-stopping never",
        {"temperature": 0.0, "num_beams": 4, "length_penalty": 2.0, "early_stopping": "never"},
    ),
    (
        "--temperature 0 --num-beams 4 --num-beam-groups 2 --diversity-penalty 0.5 --early-stopping true",
        {
            "temperature": 0.0,
            "num_beams": 4,
            "num_beam_groups": 2,
            "diversity_penalty": 0.5,
            "early_stopping": True,
        },
    ),
    (
        "--temperature 0 --num-beams 2 --beam-search-diversity-rate -0.5",
        {"temperature": 0.0, "num_beams": 2, "beam_search_diversity_rate": -0.5},
    ),
    (
        "--presence-penalty 1 --presence-penalty-rule fastertransformer",
        {"presence_penalty": 1.0, "presence_penalty_rule": "fastertransformer"},
    ),
    ("--prompt-lookup-num-tokens 3", {"prompt_lookup_num_tokens": 3}),
    ("--max-matching-ngram-size 1", {"max_matching_ngram_size": 1}),
    ("--guided-choice yes --guided-choice no", {"guided_choice": ["yes", "no"]}),
    ("--guided-regex [a-z]+", {"guided_regex": "[a-z]+"}),
    ('--guided-json {"type":"integer"}', {"guided_json": {"type": "integer"}}),
    ("--guided-grammar start:/a+/", {"guided_grammar": "start:/a+/"}),
    ("--overflow slide --stride 9", {"overflow": "slide", "stride": 9}),
    ("--logprobs 2 --logprobs-mode processed", {"logprobs": 2, "logprobs_mode": "processed"}),
    ("--prompt-logprobs 1", {"prompt_logprobs": 1}),
    ("--lora-request a", {"lora_request": "a"}),
]


def test_every_field_has_a_flag_that_is_tried():
    tried = set().union(*(given for _, given in FLAGS))
    assert tried == {field.name for field in fields(SamplingParams)} - set(NOT_FLAGS)


@pytest.mark.parametrize(("arguments", "given"), FLAGS)
def test_a_flag_is_its_field(arguments, given):
    assert flags.params_of(parse(*arguments.split())) == SamplingParams(**{**BASE, **given})


@pytest.mark.parametrize(
    ("others", "ours"),
    [
        (
            "--n-predict 9 --temp 0.5 --topk 3 --topp 0.5",
            "--max-tokens 9 --temperature 0.5 --top-k 3 --top-p 0.5",
        ),
        ("--max_new_tokens=9 --num_return_sequences 2", "--max-tokens 9 --n 2"),
        ("--random-seed 4 --beam_width 2 --len_penalty 2", "--seed 4 --num-beams 2 --length-penalty 2"),
        ("--stop-strings a --stop b", "--stop a --stop b"),
        ("--torch_dtype bf16 --kv_cache_dtype FP32", "--dtype bfloat16 --kv-cache-dtype float32"),
        ("--tensor-parallel-size 2 --pipeline_para_size 3", "--tensor-parallel 2 -pp 3"),
        ("--split_special_tokens --parallel 4 --verbose", "--no-special-tokens --max-num-seqs 4 --debug"),
    ],
)
def test_flags_of_other_programs_are_aliases(run, others, ours):
    assert parse(*others.split()) == parse(*ours.split())
    assert not re.search(
        r"--(n-predict|temp|topk|num-samples|json-schema|hf-file)\b|-tp\b", run("--help-all").out
    )


def test_flags_and_words_may_stand_in_any_order():
    expected = parse("Once", "upon", "--seed", "1")
    assert parse("--seed", "1", "Once", "upon") == parse("Once", "--seed", "1", "upon") == expected
    assert parse("--seed", "1", "--", "--temp", "max_tokens").prompt == ["--temp", "max_tokens"]


def test_the_flags_of_the_model_reach_it(run, monkeypatch):
    given = {}

    def stop(**arguments):
        given.update(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr("tinygpt.llm.LLM", stop)
    flags = (
        "--revision v1 --max-num-seqs 3 --max-num-batched-tokens 9 "
        "--prefix-cache-seqs 2 --max-model-len 64 --lora a"
    )
    more = (
        "--soft-prompt n=p=q --draft-model d --num-speculative-tokens 7 --dtype int8 --kv-cache-dtype float32"
    )
    more += " --lora-modules b=c"
    assert run(f"Once --threads 1 --no-special-tokens {flags} {more}").code == 130
    model = {"model": "demo", "dtype": "int8", "device": "cpu", "threads": 1, "kv_cache_dtype": "float32"}
    sizes = {"max_num_seqs": 3, "max_model_len": 64, "max_num_batched_tokens": 9, "prefix_cache_seqs": 2}
    others = {
        "draft_model": "d",
        "num_speculative_tokens": 7,
        "lora": "a",
        "lora_modules": {"b": "c"},
        "soft_prompts": {"n": "p=q"},
    }
    # Another number of ranks would start processes: ranks/test_mpi.py.
    ranks = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "split_special_tokens": True,
        "revision": "v1",
    }
    assert given == vars(LLMArgs()) | model | sizes | others | ranks


def test_threads_size_every_pool(monkeypatch):
    monkeypatch.delitem(flags.sys.modules, "numba", raising=False)
    for name in flags.THREAD_POOLS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    flags.set_thread_pools(None)
    pools = {name: flags.os.environ[name] for name in flags.THREAD_POOLS}
    assert pools.pop("OMP_NUM_THREADS") == "3"
    assert set(pools.values()) == {str(flags.thread_count())}
    flags.set_thread_pools(7)
    assert {flags.os.environ[name] for name in flags.THREAD_POOLS} == {"7"}


def test_the_readme_names_every_field():
    text = (ROOT / "tinygpt" / "README.md").read_text(encoding="utf-8")
    assert {field.name for field in fields(SamplingParams)} <= {*re.findall(r"`(\w+)`", text)}
