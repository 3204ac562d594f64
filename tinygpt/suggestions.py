"""What someone means who types the flags, commands and fields of other programs."""

import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches

NEAR = 0.8  # of difflib's ratio, without dashes: temprature is near temperature, and template is not

# Our flag, with its value where that is part of the meaning -> how else it is called: by transformers, vLLM, llama.cpp,
# nanoGPT and OpenAI's scripts.
MEANT: dict[str, str] = {
    "--max-tokens": "--n-predict --predict --max-length --max-new-tokens --max-len --length --num-tokens --tokens "
    "--n-tokens --new-tokens -l -len --num-predict --max-output-tokens --max-completion-tokens --output-len",
    "--min-tokens": "--min-length --min-new-tokens --min-len",
    "--temperature": "--temp -temp --t",
    "--temperature 0": "--greedy --no-sample --no-sampling --no-do-sample --argmax",
    "--top-k": "--topk -k --k",
    "--top-p": "--topp --nucleus --p --nucleus-p --top-percent",
    "--typical-p": "--typical",
    "--seed": "--random-seed --rng-seed --manual-seed --rng",
    "--n": "--num-return-sequences --num-samples --nsamples --samples --n-samples --num-outputs --num-sequences",
    "--num-beams": "--beams --beam-size --beam --beam-width --use-beam-search",
    "--stop": "--stop-words --stop-sequence --stop-sequences --stop-string --stop-strings --reverse-prompt -r --until "
    "--eos --end",
    "--repetition-penalty": "--repeat-penalty --rep-pen",
    "--no-repeat-ngram-size": "--ngram --no-repeat-ngram --ngram-size",
    "--logit-bias": "--bias",
    "--logprobs": "--log-probs --logprob --n-probs --top-logprobs --probs --output-scores",
    "--prompt-lookup-num-tokens": "--lookup --ngram-lookup",
    "--overflow": "--truncate --truncation --truncation-side --context-shift --truncate-prompt-tokens",
    "--max-time": "--timeout --time-limit",
    "--max-model-len": "--ctx-size -c --context-size --context-length --context --ctx --n-ctx --block-size "
    "--max-position-embeddings --max-seq-len --max-sequence-length --window",
    "--max-num-batched-tokens": "--ubatch-size -ub --prefill-chunk-size",
    "--max-num-seqs": "--batch-size -b --batch --parallel -np --max-batch-size --concurrency",
    "--batch-sizes": "--batch-size -b --batch --batches --bs",
    "--prompt-lengths": "-p --n-prompt --input-len --prompt-length --prompt-tokens",
    "--new-tokens": "-n --n-gen --max-tokens --output-len --n-predict --max-new-tokens",
    "--repetitions": "-r --repeat --runs --reps --iterations --num-iters --trials",
    "--model": "--checkpoint --model-path --model-name --model-id --model-name-or-path --ckpt --pretrained --path "
    "--repo --repo-id --hf-repo -hf -hfr --weights --model-dir",
    "--served-model-name": "--model-name --alias -a --model-alias",  # behind --model, which has the first name too
    "--random": "--shape --config --model-size",
    "--dtype": "--precision --quantization --quantize --quant --torch-dtype --type --weights-dtype --outtype "
    "--compute-type",
    "--dtype int8": "--load-in-8bit --int8 --8bit",
    "--dtype int4": "--load-in-4bit --int4 --4bit",
    "--dtype bfloat16": "--half --bf16 --fp16 --float16",
    "--kv-cache-dtype": "--cache-type-k --cache-type-v -ctk -ctv --kv-dtype --cache-dtype",
    "--threads": "--num-threads --n-threads --nthreads --cpu-threads --cpus --cores --threads-batch -tb "
    "--intra-op-threads",
    "--tensor-parallel": "--tensor-parallel-size --tp -tp --tp-size --tensor-para-size",
    "--pipeline-parallel": "--pipeline-parallel-size --pp -pp --pp-size --pipeline-para-size",
    "--workers": "--processes --num-processes",
    "--device cuda": "--gpu --cuda --n-gpu-layers -ngl --gpu-layers --gpus --use-gpu",
    "--device cpu": "--cpu --no-cuda --no-gpu",
    "--lora": "--adapter --peft --lora-path --enable-lora --lora-modules",
    "--soft-prompt": "--prompt-tuning --p-tuning --prefix-tuning",
    "--draft-model": "--draft --model-draft -md --speculative-model --assistant-model",
    "--num-speculative-tokens": "--draft-max --draft-n --num-assistant-tokens",
    "--prompt": "--text --instruction --question --start --init-text --prefix",
    "--file": "--prompt-file --text-file --binary-file",
    "--input": "--infile --in-file --input-file --prompts --prompts-file --dataset --jsonl --in",
    "--output": "--out --outfile --out-file -o --output-file --save --write --out-dir --export",
    "--json": "--output-json --as-json --format --output-format",
    "--format": "--output-format --table",
    "--to": "--format --output-format --target",
    "--format csv": "--csv",
    "--format md": "--markdown --md",
    "--interactive": "--chat --conversation -cnv -i --repl --instruct",
    "--echo": "--include-prompt --return-full-text --display-prompt",
    "--no-stream": "--no-streaming",
    "--guided-json": "--json-schema -j --schema --json-schema-file --response-format",
    "--guided-grammar": "--grammar --gbnf --grammar-file",
    "--guided-regex": "--regex --pattern",
    "--guided-choice": "--choices --choice",
    "--no-special-tokens": "--split-special-tokens --no-special --ignore-special-tokens --skip-special-tokens",
    "--debug": "--verbose -v --log --log-level --trace --traceback",
    "--host": "--listen --bind --address --ip",
    "--port": "-p --listen-port",
    "--api-key": "--token --key --auth",
    "--allowed-origins": "--cors --cors-origins",
    "--help-all": "--help-more --full-help --usage",
    "--calibrate": "--calibration --calibration-data --imatrix --calib",
    "--smooth": "--alpha --smoothquant",
    "--compare": "--diff --baseline",
    "--plot": "--graph --chart --figure --picture",
    "--limit": "--max-samples --num-rows --rows",
    "--stride": "--ppl-stride --overlap",
    "--tolerance": "--atol --tol --rtol",
    "--golden": "--reference --expected",
}
# What others have a flag for and none of our commands has -> why, or what to do instead.
WITHOUT: dict[str, str] = {
    "it is so anyway: leave it out": "--use-cache --enable-prefix-caching --enable-chunked-prefill --no-cnv "
    "-no-cnv --no-conversation --single-turn -st --no-warmup --low-cpu-mem-usage --cont-batching -cb --mmap",
    "one device runs the whole model: leave it out": "--device-map --main-gpu -mg --split-mode -sm "
    "--tensor-split -ts --num-gpus",
    "the memory that is taken follows from the model, --max-num-seqs and --max-model-len: leave it out": "--swap-space "
    "--gpu-memory-utilization --cpu-offload-gb --max-memory --mlock --no-mmap --no-kv-offload -nkvo --offload-folder",
    "there is one way to run a model, the fast one: leave it out": "--flash-attn -fa --attn-implementation "
    "--attention-backend --enforce-eager --compilation-config --torch-compile --num-scheduler-steps",
    "no code of a checkpoint is ever run: leave it out": "--trust-remote-code",
    "the tokenizer comes with the checkpoint: leave it out": "--tokenizer --tokenizer-mode --tokenizer-name "
    "--vocab-file --merges-file",
    "prompts are not padded: leave it out": "--pad-token-id --pad-token --padding --padding-side",
    "the main revision of a Hub id is taken: download another one, and give its folder": "--revision --branch",
    "files of the Hub lie where the variable HF_HOME says": "--download-dir --cache-dir --hf-home",
    "the penalty counts the whole text: leave it out": "--repeat-last-n --repetition-context-size",
    "GPT-2 has no roles: write it at the beginning of the prompt": "--system-prompt -sys --system --sys --messages",
    "it is not implemented; --top-p, --min-p and --typical-p are": "--mirostat --mirostat-lr --mirostat-ent "
    "--top-n-sigma --xtc-probability --xtc-threshold --dry-multiplier --dry-base --dynatemp-range --dynatemp-exp "
    "--samplers --sampling-seq --penalty-alpha --top-a --tfs --tail-free --guidance-scale",
    "one process serves all clients: leave it out": "--num-workers --data-parallel-size -dp --reload",
    "start a proxy in front for TLS": "--ssl-keyfile --ssl-certfile --ssl",
}
# The same, where what to do instead helps on a command line alone.
WITHOUT_IN_A_SHELL: dict[str, str] = {
    "stdout has the result alone: leave it out, or add 2> /dev/null": "--quiet -q --silent --log-disable --no-perf "
    "--disable-log-stats --disable-log-requests --no-progress --disable-tqdm --color -co --simple-io",
    "the log goes to stderr: give --debug, and redirect it by 2> FILE": "--log-file --logfile",
    "type $'\\n' for an end of line, which the shell reads": "--escape -e",
    "start the command with taskset or numactl": "--numa --cpu-mask --cpu-range --cpu-strict",
    "give --interactive, which has :save and :load": "--prompt-cache --prompt-cache-all --session",
}
# Our precision -> names of those that others have and that it comes nearest to: PyTorch's, NumPy's, llama.cpp's.
DTYPES_MEANT = {
    "int4": r"i?q[1-4].*|u?int[2-4].*|nf4|fp4|w4.*|.*4.?bit|awq|gptq",
    "int8": r"q[5-8].*|u?int8|f(loat|p)?8.*|w8.*|.*8.?bit",
    "bfloat16": r"b?f(loat|p)?16|half",
    "float32": r"t?f(loat|p)?(32|64)?|single|double",
}
# An argument without a flag -> the flags that others have for it.
ARGUMENTS: dict[str, str] = {
    "DST": "--output -o --outfile --out --out-dir --output-dir --dst --save",
    "FILE": "--file -f --input --text --text-file --data --dataset",
    "SRC": "--input --src --in",
}
# What others have a flag for, and `generate` does without one.
ALREADY = frozenset(["--stream", "--streaming", "--do-sample", "--sample", "--no-display-prompt", "--no-echo"])
# Our command, with a flag where that is part of the meaning -> how else it is called.
COMMANDS_MEANT: dict[str, str] = {
    "generate": "run complete completion completions sample text continue write infer inference cli prompt main",
    "generate --interactive": "chat repl interactive shell session conversation",
    "generate --input": "batch run-batch",
    "convert": "quantize quantise pack export save",
    "warmup": "compile build cache",
    "bench": "benchmark llama-bench speed perf profile throughput latency",
    "eval": "evaluate evaluation lm-eval lm_eval test-quality",
    "eval ppl": "perplexity ppl",
    "eval lambada": "lambada",
    "eval rouge": "rouge summarization summarisation",
    "info": "show inspect describe list ls config ps model download pull",
    "doctor": "check diagnose system env collect-env collect_env status",
    "parity": "compare verify test validate diff",
    "--version": "version",
    "--help": "commands usage man",
}

CHOICES_MEANT = {"cuda": "gpu nvidia cuda:0 gpu:0", "cpu": "host", "slide": "ring roll shift", "clamp": "fit"}


def nearest_flag(unknown: str, flags: Collection[str]) -> str | None:
    """The one of `flags`, perhaps with a value, that is nearest to `unknown` in meaning, or else in spelling."""
    return _nearest(unknown, flags, _meant_of(flags))


def is_meant(unknown: str, flags: Collection[str]) -> bool:
    """Whether `unknown` is another name for one of `flags`."""
    return unknown in _meant_of(flags)


def why_without(unknown: str) -> str | None:
    """Why no command has this flag of other programs, or what to do instead."""
    return _why({**WITHOUT, **WITHOUT_IN_A_SHELL}, unknown)


def _why(reasons: Mapping[str, str], unknown: str) -> str | None:
    return next((why for why, others in reasons.items() if unknown in others.split()), None)


def nearest_command(unknown: str, commands: Collection[str]) -> str | None:
    """As `nearest_flag`, of commands."""
    meant = {other: command for command, others in COMMANDS_MEANT.items() for other in others.split()}
    return _nearest(unknown.strip().lower(), commands, meant)


def nearest_choice(unknown: str, choices: Collection[str]) -> str | None:
    """As `nearest_flag`, of what an argument may be: the tasks of eval are called as its commands are."""
    own = {command.split()[-1]: others for command, others in COMMANDS_MEANT.items()}
    meant = {other: name for name in choices for other in {**own, **CHOICES_MEANT}.get(name, "").split()}
    return _nearest(unknown.strip().lower(), choices, meant)


def nearest_dtype(unknown: object, dtypes: Collection[str]) -> str | None:
    """As `nearest_flag`, of precisions, whose names may be those of other libraries' types: torch.float16."""
    word = str(unknown).strip("<>' ").lower().rpartition(".")[2]
    if word in dtypes:
        return word
    meant = next((dtype for dtype, names in DTYPES_MEANT.items() if re.fullmatch(names, word)), None)
    return meant if meant in dtypes else next(iter(get_close_matches(word, dtypes, n=1, cutoff=NEAR)), None)


def nearest_field(unknown: str, fields: Collection[str]) -> str | None:
    """As `nearest_flag`, of the names that fields of a record have."""
    flags = {_flag(field): field for field in fields}
    nearest = nearest_flag(_flag(unknown), flags)
    return None if nearest is None else flags[nearest.split()[0]]


def field_meant(unknown: str, fields: Collection[str]) -> str | None:
    """The one of `fields` that is `unknown`, or that other programs call so, however it is spelled there."""
    flags = {_flag(field): field for field in fields}
    meant = _meant_of(flags).get(_flag(unknown), _flag(unknown))
    return flags.get(meant.split()[0])


def argument_meant(unknown: str, arguments: Collection[str]) -> str | None:
    """The one of the arguments without a flag that others have the flag `unknown` for."""
    return next((name for name in arguments if unknown in ARGUMENTS.get(name, "").split()), None)


def field_hint(unknown: str, fields: Collection[str], spelled: Callable[[str], str] = str) -> str | None:
    """What to say of the name of a field that is none: why there is none, or which is nearest. `spelled` quotes it."""
    if why := _why(WITHOUT, _flag(unknown)):
        return re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), why)
    nearest = nearest_field(unknown, fields)
    return f"did you mean {spelled(nearest)}?" if nearest else None


def is_already(unknown: str) -> bool:
    """Whether the field of a record asks for what is so without it."""
    return _flag(unknown) in ALREADY


def _meant_of(flags: Collection[str]) -> dict[str, str]:
    """Another name -> the one of `flags` that it stands for."""
    return {other: flag for flag, others in MEANT.items() if flag.split()[0] in flags for other in others.split()}


def _flag(field: str) -> str:
    return f"--{field.lower().replace('_', '-')}"


def _nearest(unknown: str, names: Collection[str], meant: Mapping[str, str]) -> str | None:
    """`meant`: another name -> the one of `names` that it stands for."""
    if unknown in meant:
        return meant[unknown]
    word = unknown.lstrip("-")
    longer = [name for name in names if name.lstrip("-").startswith(word)] if len(word) > 2 else []
    if len(longer) == 1:
        return longer[0]
    known = {name.lstrip("-"): name for name in (*meant, *names) if len(name.lstrip("-")) > 2}
    nearest = [*sorted(known.keys() & _swapped(word)), *get_close_matches(word, known, n=1, cutoff=NEAR)]
    if not nearest:
        return None
    found = known[nearest[0]]
    return found if found in names else meant[found]


def _swapped(word: str) -> set[str]:
    """The word with two neighbouring letters swapped: of a short one, difflib takes that for another word."""
    return {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)}
