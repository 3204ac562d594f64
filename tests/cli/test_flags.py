"""Flags of `generate`: the help tells each, and it reaches the model; `tests/data/calls.txt` has their fields."""

import re
from dataclasses import fields

from support.paths import ROOT
from tinygpt import SamplingParams
from tinygpt.cli import flags
from tinygpt.cli import main as cli
from tinygpt.llm_args import LLMArgs


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


def test_help_has_no_aliases(run):
    assert not re.search(
        r"--(n-predict|temp|topk|num-samples|json-schema|hf-file)\b|-tp\b", run("--help-all").out
    )


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
