"""Take the README's picture of the server's page: python scripts/page_picture.py [--output FILE] [--seed N]

Continues a text in a headless Chromium, and opens the candidates of a token that was not the model's best. `--seed` is
the story's. Needs the extras `serve` and `page`, Pillow, a Chromium, and Debian's fonts-sil-charis and fonts-inter.
"""

import argparse
import io
import re
import shutil
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from tinygpt.bench.study_runs import served

PICTURE = Path(__file__).resolve().parent / "page.png"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
TEXT = "Once upon a time, there was a little bird who was afraid to fly."
SETTINGS = {"max_tokens": 66, "temperature": 0.7, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1}
VIEWPORT, SCALE = {"width": 940, "height": 672}, 1.6  # CSS pixels; device pixels for each
RIGHT, FIRST = 0.55, 12  # share of the width and number of the generated token from which on a token is opened


def take(address: str, seed: int, executable: str) -> bytes:
    """Return a PNG of the page after the text has been continued."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page(viewport=VIEWPORT, device_scale_factor=SCALE)
        expect.set_options(timeout=120_000)  # ms; kernels may compile
        link = urlencode({"text": TEXT, **SETTINGS, "seed": seed}).replace("+", "%20")
        for _ in range(2):  # the second figures are those of a warm server
            page.goto("about:blank")
            page.goto(f"{address}/#{link}")
            expect(page.locator("#go")).to_be_enabled()
            expect(page.locator("body")).to_have_attribute("data-busy", "")
            page.get_by_role("button", name="Continue").click()
            expect(page.get_by_role("status")).to_contain_text("tokens: the model")
            expect(page.locator("body")).to_have_attribute("data-busy", "")
        open_candidates(page)
        return page.screenshot()


def open_candidates(page: Page) -> None:
    generated = page.locator(".token.made")
    for i in range(FIRST, generated.count()):
        box = generated.nth(i).bounding_box()
        if box["x"] < RIGHT * VIEWPORT["width"] or not re.fullmatch(r" \w+", generated.nth(i).text_content()):
            continue
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        if re.search(r"rank [23]$", page.locator("#about").inner_text()):
            return
        page.keyboard.press("Escape")
    raise SystemExit("no generated token had a better candidate: give another --seed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--seed", type=int, default=3)
    arguments = parser.parse_args()
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        parser.error(f"there is no browser: none of {', '.join(BROWSERS)}.")
    with served("demo", "auto", {}) as (url, _):
        picture = Image.open(io.BytesIO(take(url, arguments.seed, executable)))
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(arguments.output, optimize=True)
    print(f"{arguments.output}: {picture.width} x {picture.height}, {arguments.output.stat().st_size / 1e3:.0f} kB")
