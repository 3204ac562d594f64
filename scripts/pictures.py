"""Make the README's pictures in scripts/: python scripts/pictures.py stream bars page

stream: a run of the demo as `tinygpt generate --color surprise` prints it, at its own pace: the fastest of nine.
bars: tokens/s of float32 and int8, from the README's table. page: the server's page with the candidates of a token,
what each layer would say, and what a head attends to (playwright).
"""

import re
import shutil
import sys
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path
from urllib.parse import urlencode

from tinygpt import LLM, SamplingParams
from tinygpt.bench.sweep import started
from tinygpt.look import bits
from tinygpt.look.html import color

ROOT = Path(__file__).resolve().parents[1]
PROMPT, SEED = "Once upon a time", 264
# characters, pixels, seconds before the text and of the whole text
COLUMNS = 92
LINE = 25
START = 1
REST = 4
HEAD = (1, 3)  # a layer and its head, of the page's picture
TERMINAL = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" width="900" height="{height}">
<title>{title}</title>
<style>
@property --t {{ syntax: "&lt;number&gt;"; inherits: true; initial-value: 999 }}
@keyframes run {{ from {{ --t: 0 }} to {{ --t: {seconds} }} }}
text {{ font: 15px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre;
  fill: #ece7dd }}
g {{ animation: run {seconds}s linear infinite }}
tspan {{ fill-opacity: calc((var(--t) - var(--at)) * 1000) }}
@media (prefers-reduced-motion: reduce) {{ g {{ animation: none }} }}
</style>
<rect width="900" height="{height}" rx="10" fill="#1a1917"/>
<text x="24" y="40"><tspan style="--at: -1" fill="#a0988a">$ </tspan>{command}</text>
<g>
{lines}
</g>
</svg>
"""
BARS = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 330" width="900" height="330">
<title>{title}</title>
<style>
text {{ font: 15px system-ui, sans-serif; fill: #211e1a }}
.title {{ font-weight: 600; font-size: 16px }} .dim {{ fill: #6f685c }} .ours {{ fill: #e04a2b; font-weight: 600 }}
rect {{ fill: #b9b2a4 }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #ece7dd }} .dim {{ fill: #a0988a }} .ours {{ fill: #ec6a4b }}
  rect {{ fill: #6f685c }} }}
rect.ours {{ fill: #e04a2b }}
</style>
<text class="title" y="20">{title}</text>
{rows}
<text class="dim" y="318" style="font-size: 13px">{note}</text>
</svg>
"""


def stream(tokens: Iterable[tuple[str, float, float]]) -> str:
    """Return the moving picture of (text, natural log probability, seconds after the start) of each token."""
    lines = [""]
    column = 0
    for text, logprob, seconds in tokens:
        if "\n" in text or (column + len(text) > COLUMNS and text[0] == " "):
            lines = [*lines, ""]
            column = 0
            text = text.lstrip()
        column += len(text)
        rgb = color(bits(logprob))
        fill = "" if rgb is None else f' fill="rgb{rgb}"'
        lines[-1] += f'<tspan style="--at: {START + seconds:.4f}"{fill}>{escape(text)}</tspan>'
    texts = [f'<text x="24" y="{40 + LINE * y}">{line}</text>' for y, line in enumerate(lines, 1)]
    command = escape(f'tinygpt generate "{PROMPT}" --seed {SEED} --echo --color surprise')
    title = "A terminal in which a story appears, in real time; the more a token surprised the model, the redder it is"
    height = 40 + LINE * len(lines) + 24
    return TERMINAL.format(
        height=height,
        title=title,
        seconds=f"{START + seconds + REST:.1f}",
        command=command,
        lines="\n".join(texts),
    )


def bars(readme: str) -> str:
    """Return the bars of two columns: ours and the fastest other engine's, each batch on a scale of its own."""
    rows = []
    leads = {"float32": [], "int8": []}
    y = 56
    for batch, name in ((1, "one text"), (32, "32 texts at once")):
        line = re.findall(rf"^\| decode, batch {batch} \|(.*)\|$", readme, re.MULTILINE)[0].replace("*", "")
        rates = {}
        for dtype, cell in zip(leads, line.split("|")[::2], strict=True):
            ours, peer, theirs = re.findall(r"([\d.]+), (\S+) ([\d.]+)", cell)[0]
            rates[dtype] = {"tinygpt": 1e3 * batch / float(ours), peer: 1e3 * batch / float(theirs)}
            leads[dtype].append(float(theirs) / float(ours))
        scale = 490 / max(max(by_engine.values()) for by_engine in rates.values())
        for dtype, speeds in rates.items():
            rows.append(f'<text class="dim" y="{y}">{name}, {dtype}</text>')
            for engine in sorted(speeds, key=speeds.__getitem__, reverse=True):
                width = scale * speeds[engine]
                look = ' class="ours"' * (engine == "tinygpt")
                rows.append(f'<text{look} x="260" y="{y}" text-anchor="end">{engine}</text>')
                rows.append(f'<rect{look} x="272" y="{y - 15}" width="{width:.1f}" height="20" rx="2"/>')
                rows.append(f'<text{look} x="{280 + width:.1f}" y="{y}">{speeds[engine]:.0f} tokens/s</text>')
                y += 26
            y += 10
        y += 8
    spans = [
        " to ".join(dict.fromkeys(f"{lead:.1f}" for lead in (min(of_dtype), max(of_dtype))))
        for of_dtype in leads.values()
    ]
    title = f"GPT-2 124M decodes {spans[0]} times as fast as the next engine in float32, {spans[1]} in int8"
    peers = "the fastest of transformers, onnxruntime (and -genai), OpenVINO, CTranslate2, llama.cpp, vLLM"
    note = f"From the table below: 2 cores of an Intel Xeon. Next is {peers}."
    return BARS.format(title=title, rows="\n".join(rows), note=note)


def page(path: Path) -> None:
    """Take a picture of the page after a short continuation, with a look inside for a token."""
    from playwright.sync_api import sync_playwright

    asked = {
        "text": "Once upon a time, there was a little bird who was afraid to fly.",
        "max_tokens": 19,
        "seed": 5,
    }
    serve = [sys.executable, "-m", "tinygpt", "serve", "--port", "0", "--look"]
    with started(serve, cwd=ROOT) as (address, _), sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell") or shutil.which("chromium"),
            args=["--no-sandbox"],
        )
        view = browser.new_page(viewport={"width": 980, "height": 830}, device_scale_factor=1.5)
        view.goto(f"{address}/#{urlencode(asked)}")
        view.locator("body[data-busy=''] #go:enabled").click()
        view.locator("#status", has_text="tokens: the model").wait_for(state="attached")
        view.locator("body[data-busy='']").wait_for()
        view.evaluate("() => { pace = null; showStats() }")  # times depend on what else the machine does
        view.locator(".made .word").nth(12).click(force=True)  # under the transparent field
        view.locator("#look").click()
        view.locator("#inside > div").nth(HEAD[0]).locator("button").nth(HEAD[1]).hover()
        view.screenshot(path=path, full_page=True)
        browser.close()


def main(names: list[str]) -> None:
    folder = ROOT / "scripts"
    if "stream" in names:
        params = SamplingParams(max_tokens=128, temperature=0.8, top_k=40, top_p=0.95, seed=SEED, logprobs=0)
        with LLM("demo") as llm:
            runs = [[(chunk, time.perf_counter()) for chunk in llm.stream(PROMPT, params)] for _ in range(9)]
        run = min(runs, key=lambda run: run[-1][1] - run[0][1])  # undisturbed
        timed = (
            (chunk.text, chunk.logprobs[chunk.token_id], at - run[0][1]) for chunk, at in run if chunk.text
        )
        tokens = [(PROMPT, 0.0, 0.0), *timed]
        (folder / "stream.svg").write_text(stream(tokens), encoding="utf-8")
    if "bars" in names:
        text = bars((ROOT / "README.md").read_text(encoding="utf-8"))
        (folder / "tokens_per_second.svg").write_text(text, encoding="utf-8")
    if "page" in names:
        page(folder / "page.png")


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
