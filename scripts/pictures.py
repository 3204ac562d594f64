"""Make the README's pictures in scripts/: python scripts/pictures.py stream bars page

stream: a run of the demo as `tinygpt generate --color surprise` prints it, slowed down so that it can be read.
bars: tokens/s of int8, from the README's table. page: the server's page with the candidates of a token, what each
layer would say, and what a head attends to (playwright).
"""

import re
import shutil
import sys
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
# characters, pixels, tokens a second, seconds of the whole text
COLUMNS = 92
LINE = 25
RATE = 20
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
BARS = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 236" width="900" height="236">
<title>{title}</title>
<style>
text {{ font: 15px system-ui, sans-serif; fill: #211e1a }}
.title {{ font-weight: 600; font-size: 17px }} .dim {{ fill: #6f685c }} .ours {{ fill: #e04a2b; font-weight: 600 }}
rect {{ fill: #b9b2a4 }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #ece7dd }} .dim {{ fill: #a0988a }} .ours {{ fill: #ec6a4b }}
  rect {{ fill: #6f685c }} }}
rect.ours {{ fill: #e04a2b }}
</style>
<text class="title" y="20">{title}</text>
{rows}
<text class="dim" y="226" style="font-size: 13px">{note}</text>
</svg>
"""


def stream(tokens: Iterable[tuple[str, float]]) -> str:
    """Return the moving picture of (text, natural log probability) of each token."""
    lines = [""]
    column = 0
    at = 1.0
    for text, logprob in tokens:
        if "\n" in text or (column + len(text) > COLUMNS and text[0] == " "):
            lines = [*lines, ""]
            column = 0
            text = text.lstrip()
        column += len(text)
        rgb = color(bits(logprob))
        fill = "" if rgb is None else f' fill="rgb{rgb}"'
        lines[-1] += f'<tspan style="--at: {at:.2f}"{fill}>{escape(text)}</tspan>'
        at += 1 / RATE
    texts = [f'<text x="24" y="{40 + LINE * y}">{line}</text>' for y, line in enumerate(lines, 1)]
    command = escape(f'tinygpt generate "{PROMPT}" --seed {SEED} --echo --color surprise')
    title = "A terminal in which a story appears; the more a token surprised the model, the redder it is"
    height = 40 + LINE * len(lines) + 24
    return TERMINAL.format(
        height=height, title=title, seconds=f"{at + REST:.1f}", command=command, lines="\n".join(texts)
    )


def bars(readme: str) -> str:
    """Return the bars of the int8 column: ours and the fastest other engine's, each batch on a scale of its own."""
    rows = []
    leads = []
    y = 48
    for batch, name in ((1, "one text"), (32, "32 texts at once")):
        cell = re.findall(rf"^\| decode, batch {batch} \|(.*)\|$", readme, re.MULTILINE)[0].split("|")[2]
        ours, peer, theirs = re.findall(r"([\d.]+), (\S+) ([\d.]+)", cell.replace("*", ""))[0]
        rates = {"tinygpt": 1e3 * batch / float(ours), peer: 1e3 * batch / float(theirs)}
        leads.append(rates["tinygpt"] / rates[peer])
        rows.append(f'<text class="dim" y="{y + 6}">{name}</text>')
        for engine in sorted(rates, key=rates.__getitem__, reverse=True):
            width = 490 * rates[engine] / max(rates.values())
            look = ' class="ours"' * (engine == "tinygpt")
            rows.append(f'<text{look} x="260" y="{y + 6}" text-anchor="end">{engine}</text>')
            rows.append(f'<rect{look} x="272" y="{y - 10}" width="{width:.1f}" height="22" rx="2"/>')
            rows.append(f'<text{look} x="{280 + width:.1f}" y="{y + 6}">{rates[engine]:.0f} tokens/s</text>')
            y += 32
        y += 22
    title = f"GPT-2 124M in int8: {min(leads):.1f} to {max(leads):.1f} times as fast as the next engine"
    peers = "the fastest of transformers, onnxruntime, OpenVINO, CTranslate2 and llama.cpp"
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
            executable_path=shutil.which("chromium-headless-shell"), args=["--no-sandbox"]
        )
        view = browser.new_page(viewport={"width": 980, "height": 830}, device_scale_factor=1.5)
        view.goto(f"{address}/#{urlencode(asked)}")
        view.locator("body[data-busy=''] #go:enabled").click()
        view.locator("#status", has_text="tokens: the model").wait_for(state="attached")
        view.locator("body[data-busy='']").wait_for()
        view.evaluate("() => { pace = null; showStats() }")  # times depend on what else the machine does
        view.locator(".token.made").nth(12).click(force=True)  # under the transparent field
        view.locator("#look").click()
        view.locator("#inside > div").nth(HEAD[0]).locator("button").nth(HEAD[1]).hover()
        view.screenshot(path=path)
        browser.close()


def main(names: list[str]) -> None:
    folder = ROOT / "scripts"
    if "stream" in names:
        params = SamplingParams(max_tokens=128, temperature=0.8, top_k=40, top_p=0.95, seed=SEED, logprobs=0)
        with LLM("demo") as llm:
            chunks = [*llm.stream(PROMPT, params)]
        tokens = [
            (PROMPT, 0.0),
            *((chunk.text, chunk.logprobs[chunk.token_id]) for chunk in chunks if chunk.text),
        ]
        (folder / "stream.svg").write_text(stream(tokens), encoding="utf-8")
    if "bars" in names:
        text = bars((ROOT / "README.md").read_text(encoding="utf-8"))
        (folder / "tokens_per_second.svg").write_text(text, encoding="utf-8")
    if "page" in names:
        page(folder / "page.png")


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
