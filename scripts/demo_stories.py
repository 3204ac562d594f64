"""Stories by the demo, one for each seed, to choose a README's from: python scripts/demo_stories.py [--seeds 0 40]

They are what `tinygpt generate "Once upon a time" --seed N` writes, whose flags have their defaults: from each seed the
same story on every machine. Those that do not come to an end within --max-tokens are left out, or shown with --all.
"""

import argparse
import textwrap
from dataclasses import replace

from tinygpt import LLM
from tinygpt.cli import main as cli
from tinygpt.cli.flags import params_of

WIDTH = 110


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--model", default="demo", help="a folder, such as what train_demo.py writes (default: demo)")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 40), metavar=("FIRST", "END"))
    parser.add_argument("--all", action="store_true", help="those without an end, too")
    arguments = parser.parse_args()
    params = params_of(cli.parse(["generate", arguments.prompt]))
    seeds = range(*arguments.seeds)
    with LLM(arguments.model) as llm:
        outputs = llm.generate([arguments.prompt] * len(seeds), [replace(params, seed=seed) for seed in seeds])
    for seed, output in zip(seeds, outputs, strict=True):
        (story,) = output.outputs
        if story.finish_reason == "stop" or arguments.all:
            print(f"\n--seed {seed}, {len(story.token_ids)} tokens, {story.finish_reason}")
            for paragraph in (output.prompt + story.text).splitlines():
                print(textwrap.fill(paragraph, WIDTH, initial_indent="    ", subsequent_indent="    "))


if __name__ == "__main__":
    main()
