"""The picture of the server's page in the README: python scripts/page_picture.py [--output FILE] [--seed N]

Serves the demo, has it continue a text in a headless Chromium, and opens the candidates of the first token, far enough
to the right, for which the model had a better one. `--seed` is that of the story: look at the picture, and take another
if the story is not one to show. Needs the extras `serve` and `page`, Pillow, a Chromium, and the fonts of the picture
(Debian's fonts-sil-charis and fonts-inter).
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

PICTURE = Path(__file__).resolve().parent / "page.png"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
TEXT = "Once upon a time, there was a little bird who was afraid to fly."
SETTINGS = {"max_tokens": 66, "temperature": 0.7, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1}
WIDTH, HEIGHT, SCALE = 940, 672, 1.6  # CSS pixels, and how many of the picture stand for one
SECONDS = 120  # kernels may have to compile
RIGHT, FIRST = 0.55, 12  # the share of the width from which on, and the made token from which on, one is chosen


@contextmanager
def served() -> Iterator[str]:
    """The address of the demo behind a server."""
    command = [sys.executable, "-m", "tinygpt", "serve", "--served-model-name", "demo", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            addresses = (re.findall(r"serving demo on (http://\S+)", line) for line in server.stderr)
            found = next(filter(None, addresses), None)
            if found is None:
                raise SystemExit("tinygpt serve does not begin: run it to see why")
            yield found[0]
        finally:
            server.terminate()


def take(address: str, seed: int, executable: str) -> bytes:
    """A PNG of the page after the text has been continued."""
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE)
        expect.set_options(timeout=1000 * SECONDS)
        link = urlencode({"text": TEXT, **SETTINGS, "seed": seed}).replace("+", "%20")
        for _ in range(2):  # the second time everything is compiled, so that the figures are those of a warm server
            page.goto("about:blank")
            page.goto(f"{address}/#{link}")
            expect(page.locator("#go")).to_be_enabled()
            expect(page.locator("body")).to_have_attribute("data-busy", "")
            page.get_by_role("button", name="Continue").click()
            expect(page.get_by_role("status")).to_contain_text("tokens: the model")
            expect(page.locator("body")).to_have_attribute("data-busy", "")
        open_candidates(page)
        return page.screenshot()


def open_candidates(page) -> None:
    made = page.locator(".token.made")
    for i in range(FIRST, made.count()):
        box = made.nth(i).bounding_box()
        if box["x"] < RIGHT * WIDTH or not re.fullmatch(r" \w+", made.nth(i).text_content()):
            continue
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        if re.search(r"rank [23]$", page.locator("#about").inner_text()):
            return
        page.keyboard.press("Escape")
    raise SystemExit("the model had no better one for any of these tokens: give another --seed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--seed", type=int, default=3)
    arguments = parser.parse_args()
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        parser.error(f"there is no browser: none of {', '.join(BROWSERS)}.")
    from PIL import Image

    with served() as address:
        picture = Image.open(io.BytesIO(take(address, arguments.seed, executable)))
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(arguments.output, optimize=True)
    print(f"{arguments.output}: {picture.width} x {picture.height}, {arguments.output.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
