"""The page at `/` in a headless Chromium."""

import pytest

pytest.importorskip("playwright", reason="playwright, which drives a browser, is not installed")

import math
import re
import shutil

from playwright.sync_api import expect, sync_playwright

from support.gate import Gate
from support.serving import served, until
from tinygpt import LLM

pytestmark = pytest.mark.page
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
TEXT = "Once upon a time there was a king"
SETTINGS = {
    "max_tokens": 12,
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 50,
    "repetition_penalty": 1.1,
    "seed": 7,
}
SECONDS = 20


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"there is no browser: none of {', '.join(BROWSERS)}")
    expect.set_options(timeout=SECONDS * 1000)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """`visit(server, text, **settings)` opens the page and waits until the text has been read. After the test there
    must have been no complaint in the console, and no request elsewhere."""
    visitors = []

    def visit(server, text=TEXT, is_ready=True, **options):
        settings = SETTINGS | {name: options.pop(name) for name in [*options] if name in SETTINGS}
        visitors.append(Visitor(browser, server, **options))
        visitors[-1].open(text, settings, is_ready)
        return visitors[-1]

    yield visit
    for visitor in visitors:
        visitor.page.close()
        assert visitor.complaints == []
        assert {url.rpartition("#")[0] or url for url in visitor.elsewhere} == set()


class Visitor:
    """The page of a server, and what it has asked for. allowed: a pattern of what the browser's console may report."""

    def __init__(self, browser, server, allowed="^$", **options):
        self.page = browser.new_page(**options)
        self.server = server
        self.complaints = []
        self.elsewhere = []
        self.asked = []
        self.field = self.page.locator("#text")
        self.tokens = self.page.locator(".token")
        self.made = self.page.locator(".token.made")
        self.options = self.page.get_by_role("option")
        self.alert = self.page.get_by_role("alert")
        self._allowed = allowed
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._see)

    def open(self, text, settings, is_ready=True):
        fields = {"text": text, **settings}
        link = "&".join(f"{name}={_quoted(value)}" for name, value in fields.items())
        self.page.goto(f"http://127.0.0.1:{self.server.port}/#{link}")
        if is_ready:
            expect(self.page.locator("#go")).to_be_enabled()
            self.wait()

    def wait(self):
        """Until nothing runs, and the text has been read to its end."""
        expect(self.page.locator("body")).to_have_attribute("data-busy", "")

    def type(self, text):
        """As keys, which the page reads after a pause."""
        with self.page.expect_response("**/v1/completions"):
            self.field.press_sequentially(text)
        self.wait()

    def write(self):
        """Continue the text, and wait until all of it has been read."""
        self.press("Continue")
        expect(self.page.get_by_role("status")).to_contain_text("tokens: the model")
        self.wait()

    def press(self, button):
        self.page.get_by_role("button", name=button).click()

    def click(self, i):
        self.tokens.nth(i).locator(".word").click(force=True)  # under the transparent field

    def bits(self):
        return self.tokens.evaluate_all(
            "all => all.map(each => Number(each.style.getPropertyValue('--bits')))"
        )

    def texts(self):
        return self.tokens.all_text_contents()

    def written(self):
        """The bodies of the requests that were to write, not only to read."""
        return [body for body in self.asked if body["max_tokens"] > 1]

    def _note(self, message):
        if message.type == "error" and not re.search(self._allowed, message.text):
            self.complaints.append(message.text)

    def _see(self, request):
        if not request.url.startswith((f"http://127.0.0.1:{self.server.port}/", "data:")):
            self.elsewhere.append(request.url)
        if request.method == "POST":
            self.asked.append(request.post_data_json)


def _quoted(value):
    return "".join(f"%{byte:02X}" for byte in str(value).encode())


def ids_of(llm, text):
    return llm.tokenizer.encode(text, split_special_tokens=True)


def bits_of(llm, ids):
    [output] = llm.generate([ids], max_tokens=1, prompt_logprobs=0)
    pairs = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    return pytest.approx([min(12.5, -logprobs[i] / math.log(2)) for i, logprobs in pairs], abs=0.006)


def running(server):
    found = re.search(
        r"^tinygpt:num_requests_running\{.*\} (\S+)$", server.ask("/metrics").body.decode(), re.MULTILINE
    )
    return float(found[1])


def test_a_text_is_read_when_the_page_opens(server, llm, visit):
    visitor = visit(server)
    assert visitor.texts() == [llm.tokenizer.decode([i]) for i in ids_of(llm, TEXT)]
    assert visitor.bits()[1:] == bits_of(llm, ids_of(llm, TEXT))


@pytest.mark.parametrize("count", [252, 400])
def test_a_text_goes_on_beyond_the_context(server, llm, visit, count):
    """It is colored in its last 512 tokens, and the page says so."""
    text = "the king " * count
    visitor = visit(server, text, allowed="status of 400")
    ids = ids_of(llm, text)
    first = max(0, len(ids) - 512)
    unread = visitor.page.locator(".token.unread")
    assert unread.count() == first + (first > 0)  # what is before the first of the 512 was not read
    assert visitor.bits()[first + 1 :][:500] == bits_of(llm, ids[first:][:501])
    visitor.write()
    [output] = llm.generate([ids], **SETTINGS, overflow="slide")
    assert visitor.field.input_value() == text + output.outputs[0].text
    expect(visitor.page.locator("#note")).to_contain_text(f"the last of these {len(ids) + 12}")
    visitor.field.fill(text[:899])  # whose tokens are known, but have no colors
    expect(unread).to_have_count(0)
    expect(visitor.page.locator("#note")).to_be_hidden()


def test_surprise_is_the_strength_of_a_colour(visit):
    with LLM("demo") as trained, served(trained) as server:  # a random model is surprised by everything
        visitor = visit(server)
        words = visitor.page.locator(".word")
        images = [
            each.evaluate_all("all => all.map(each => getComputedStyle(each).backgroundImage)")
            for each in (words, visitor.tokens)
        ]
        shown = [*zip(visitor.bits(), images[0], strict=True)]
    assert {*images[1]} == {"none"}  # nor has a space before a word, which a line may end with
    assert " ".join(words.all_text_contents()) == TEXT
    alphas = [float(re.search(r"/ ([\d.]+)\)", image)[1]) for _, image in sorted(shown)]
    assert len(set(alphas)) >= 5
    assert alphas == sorted(alphas)
    assert (
        min(alpha for alpha, (found, _) in zip(alphas, sorted(shown), strict=True) if found >= 2) >= 0.2
    )  # is seen


def test_the_text_comes_while_it_is_written(server, llm, visit):
    visitor = visit(server, max_tokens=20)
    with llm.engine.wrapped(Gate) as gate:
        visitor.press("Continue")
        gate.allow(4)
        expect(visitor.made).to_have_count(4)
        expect(visitor.page.get_by_role("button", name="Stop")).to_be_enabled()
        assert visitor.field.input_value() == "".join(visitor.texts())
        gate.allow(float("inf"))
        expect(visitor.made).to_have_count(20)
        visitor.wait()
    expect(visitor.page.get_by_role("button", name="Stop")).to_have_count(0)  # nothing is to be stopped


def test_what_is_written_is_what_the_library_writes(server, llm, visit):
    visitor = visit(server)
    visitor.write()
    [output] = llm.generate(TEXT, **SETTINGS)
    assert visitor.field.input_value() == TEXT + output.outputs[0].text
    [asked] = visitor.written()
    assert {name: asked[name] for name in SETTINGS} == SETTINGS


def test_measurements_are_told(server, visit):
    visitor = visit(server)
    visitor.write()
    names, values = visitor.page.locator("#stats dt"), visitor.page.locator("#stats dd")
    stats = dict(zip(names.all_inner_texts(), values.all_inner_texts(), strict=True))
    assert stats["tokens"] == str(visitor.tokens.count())
    assert {*stats} == {"tokens", "bits a token", "ms to the first", "tokens/s"}
    assert visitor.page.locator("#trace > i").count() == visitor.tokens.count()


def test_markup_stays_text(server, visit):
    text = "The <b>dog</b> <script>throw 1</script> &amp; sat\n\n\tdown"
    visitor = visit(server, text)
    assert "".join(visitor.texts()) == text
    visitor.field.fill(text * 2)  # whose second half nobody has read yet
    assert visitor.page.locator(".unread").inner_text().startswith("The <b>dog</b>")
    assert visitor.page.locator("#marks b, #marks script").count() == 0


def test_characters_of_several_tokens_are_whole(server, llm, visit):
    text = "A wolf 🐺 näh \u202e sat down"  # and none reverses what is behind it
    visitor = visit(server, text)
    assert "".join(visitor.texts()) == text
    assert visitor.tokens.count() == len(ids_of(llm, text)) > 8
    ends = visitor.tokens.evaluate_all("all => all.map(each => each.getBoundingClientRect().right)")
    assert ends == sorted(ends)
    visitor.write()
    assert visitor.written()[0]["prompt"] == ids_of(llm, text)


def test_candidates_open_by_mouse_and_one_of_them_branches(server, llm, visit):
    visitor = visit(server)
    visitor.click(3)
    expect(visitor.page.locator("#look")).to_be_hidden()  # the server was started without it
    [prefix, token] = [ids_of(llm, TEXT)[:3], ids_of(llm, TEXT)[3]]
    [output] = llm.generate([prefix], max_tokens=1, temperature=0, logprobs=10)
    ranked = [*output.outputs[0].logprobs[0]][:10]
    assert visitor.options.count() == 10 + (token not in ranked)
    expect(visitor.page.locator("#list [aria-selected=true]")).to_have_count(1)
    visitor.options.nth(1).click()
    expect(visitor.page.get_by_role("status")).to_contain_text("tokens: the model")
    [asked] = visitor.written()
    assert asked["prompt"] == [*prefix, ranked[1]]
    assert not asked["echo"]
    expect(visitor.page.locator(".token.picked")).to_have_text(llm.tokenizer.decode([ranked[1]]))
    assert visitor.field.input_value().startswith(llm.tokenizer.decode([*prefix, ranked[1]]))


def test_candidates_open_by_key(server, llm, visit):
    visitor = visit(server)
    visitor.field.press("Home")
    visitor.page.keyboard.press("Control+Space")
    expect(visitor.options.and_(visitor.page.locator("[aria-selected=true]"))).to_be_focused()
    visitor.page.keyboard.press("Home")
    expect(visitor.options.first).to_be_focused()
    visitor.page.keyboard.press("ArrowUp")
    expect(visitor.options.last).to_be_focused()
    visitor.page.keyboard.press("Escape")
    expect(visitor.page.locator("#candidates")).to_be_hidden()
    expect(visitor.field).to_be_focused()
    assert visitor.written() == []


def test_candidates_behind_the_text_write_it_on(server, llm, visit):
    visitor = visit(server)
    visitor.field.press("Control+End")
    visitor.page.keyboard.press("Control+Space")
    [output] = llm.generate(TEXT, max_tokens=1, temperature=0, logprobs=10)
    best = output.outputs[0].token_ids[0]
    expect(visitor.options.first).to_be_focused()
    share = visitor.options.first.locator(".share").inner_text()
    expect(visitor.options.first).to_have_accessible_name(f"{llm.tokenizer.decode([best]).strip()}, {share}")
    expect(visitor.options.first.locator(".best i")).to_have_attribute("aria-hidden", "true")
    visitor.page.keyboard.press("Enter")
    expect(visitor.made).to_have_count(SETTINGS["max_tokens"])
    assert visitor.written()[0]["prompt"] == [*ids_of(llm, TEXT), best]


def test_a_bar_is_the_candidates_share_of_one(server, llm, visit):
    visitor = visit(server)
    visitor.click(3)
    bars = visitor.page.locator("#list .bar").evaluate_all(
        "all => all.map(each => each.firstChild.getBoundingClientRect().width / each.getBoundingClientRect().width)"
    )
    texts = visitor.page.locator("#list .share").all_inner_texts()
    shares = [float(re.search(r"[\d.]+", text)[0]) / 100 for text in texts]
    least = 1.5 / visitor.page.locator("#list .bar").first.bounding_box()["width"]  # of a bar, in pixels
    assert bars == pytest.approx([max(share, least) for share in shares], abs=0.003)


@pytest.mark.parametrize("width", [360, 940, 1600])
@pytest.mark.parametrize("i", [0, 3, -1])
def test_the_candidates_cover_no_measurement_and_no_button(server, visit, width, i):
    visitor = visit(server, viewport={"width": width, "height": 700})
    height = visitor.page.locator("#page").bounding_box()["height"]
    visitor.click(i)
    popup = visitor.page.locator("#candidates").bounding_box()
    needed = [visitor.page.locator(f"#{name}") for name in ("trace", "stats", "scale", "controls", "go")]
    for box in (each.bounding_box() for each in (visitor.tokens.nth(i), *needed)):
        is_aside = popup["x"] >= box["x"] + box["width"] or popup["x"] + popup["width"] <= box["x"]
        assert is_aside or popup["y"] >= box["y"] + box["height"] or popup["y"] + popup["height"] <= box["y"]
    assert 0 <= popup["x"] <= width - popup["width"]
    visitor.page.keyboard.press("Escape")
    expect(visitor.page.locator("#candidates")).to_be_hidden()
    until(
        lambda: visitor.page.locator("#page").bounding_box()["height"] == height
    )  # the popup's event comes later


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)])
def test_the_candidates_cover_no_word_that_follows(server, visit, width, height):
    visitor = visit(server, " ".join([TEXT] * 5), viewport={"width": width, "height": height})
    visitor.click(3)
    popup, sheet = (visitor.page.locator(name).bounding_box() for name in ("#candidates", "#sheet"))
    end = visitor.page.locator(".word").last.bounding_box()
    assert popup["x"] >= sheet["x"] + sheet["width"] or popup["y"] >= end["y"] + end["height"]
    if width == 1280:
        assert sheet["height"] > height / 2  # it fills the window


def test_a_long_text_is_read_without_a_refusal(server, llm, visit):
    """The visitor's console holds no status 400."""
    visitor = visit(server, " ".join([TEXT] * 100))
    expect(visitor.page.locator("#note")).to_be_visible()
    assert [body.get("overflow") for body in visitor.asked if "max_tokens" in body][:1] == [None]


@pytest.mark.parametrize("most", [3, 0])
def test_no_more_candidates_than_the_server_tells(llm, visit, most):
    with served(llm, max_logprobs=most) as server:
        visitor = visit(server)
        assert visitor.tokens.count() == len(ids_of(llm, TEXT))
        visitor.click(3)
        assert most <= visitor.options.count() <= max(most, 1) + 1
        visitor.page.keyboard.press("Escape")
        visitor.write()
        assert {body["logprobs"] for body in visitor.asked} == {most}


def test_a_text_that_the_model_begins_goes_on_from_there(server, llm, visit):
    """BOS stands before it, whenever it is sent."""
    visitor = visit(server, "", max_tokens=5)
    visitor.write()
    visitor.write()
    second = visitor.written()[1]
    [output] = llm.generate("", **SETTINGS | {"max_tokens": 5})
    assert second["prompt"] == output.prompt_token_ids + output.outputs[0].token_ids


def test_undo_and_redo(server, visit):
    visitor = visit(server)
    visitor.write()
    written = visitor.field.input_value()
    visitor.press("Undo")
    expect(visitor.field).to_have_value(TEXT)
    visitor.press("Redo")
    expect(visitor.field).to_have_value(written)
    expect(visitor.made).to_have_count(SETTINGS["max_tokens"])
    visitor.field.press("Control+z")
    expect(visitor.field).to_have_value(TEXT)
    visitor.field.press("Control+Shift+z")
    expect(visitor.field).to_have_value(written)


def test_typing_is_read_and_can_be_undone(server, llm, visit):
    visitor = visit(server)
    visitor.field.press("Control+End")
    visitor.field.press_sequentially("!!")
    visitor.field.press("Control+z")
    expect(visitor.field).to_have_value(TEXT)
    visitor.write()
    visitor.field.press("Control+End")
    before = visitor.field.input_value()
    visitor.type(" and 9 wolves")
    assert "".join(visitor.texts()) == before + " and 9 wolves"
    assert visitor.asked[-1]["prompt"] == before + " and 9 wolves"
    assert visitor.made.count() == SETTINGS["max_tokens"]  # what was written is known as that
    visitor.field.press("Control+z")
    expect(visitor.field).to_have_value(before)


@pytest.mark.parametrize("how", ["button", "key", "typing"])
def test_stop_frees_what_the_server_holds(server, llm, visit, how):
    visitor = visit(server, max_tokens=100)
    with llm.engine.wrapped(Gate) as gate:
        visitor.field.press("Control+Enter")
        gate.allow(3)
        expect(visitor.made).to_have_count(3)
        assert running(server) == 1
        if how == "button":
            visitor.press("Stop")
        elif how == "key":
            visitor.page.keyboard.press("Escape")
        else:
            visitor.field.press("!")
        gate.allow(float("inf"))
        until(lambda: running(server) == 0)
        visitor.wait()
    assert visitor.made.count() == 3


def test_a_refusal_is_told(server, visit):
    """It is seen whatever the length of the text, and so are the fields that it speaks of."""
    text = "the king " * 300
    visitor = visit(server, text, allowed="status of 400")
    top_p = visitor.page.get_by_label("top-p")
    top_p.evaluate("input => { input.max = ''; input.value = 2 }")
    visitor.press("Continue")
    expect(visitor.alert).to_contain_text("top_p is 2")
    expect(visitor.alert).to_be_in_viewport()
    expect(top_p).to_be_in_viewport()
    assert visitor.field.input_value() == text
    visitor.field.press("Backspace")
    expect(visitor.alert).to_have_count(0)


def test_a_drawn_seed_is_shown(server, visit):
    visitor = visit(server, seed="")
    visitor.write()
    expect(visitor.page.locator("#drawn")).to_have_text(str(visitor.written()[0]["seed"]))


def test_a_link_holds_text_and_settings(server, visit):
    text = "Émile & 'Zoë' said: \"100 %\"\n#1"
    visitor = visit(server, text, temperature=0.25, seed=11)
    visitor.write()
    visitor.press("Copy link")
    link = visitor.page.url
    written = visitor.field.input_value()
    other = visit(server)
    other.page.goto(link)
    other.page.reload()
    expect(other.field).to_have_value(written)
    assert other.page.locator("#temperature").input_value() == "0.25"
    assert other.page.locator("#seed").input_value() == "11"


def test_a_key_is_asked_for_and_kept_out_of_links(llm, visit):
    with served(llm, api_keys=("a secret",)) as server:
        visitor = visit(server, is_ready=False, allowed="status of 401")
        expect(visitor.alert).to_have_text("This server wants an API key.")
        visitor.page.get_by_label("API key").fill("wrong")
        visitor.press("Use this key")
        expect(visitor.alert).to_have_text("This server wants another API key.")
        visitor.page.get_by_label("API key").fill("a secret")
        visitor.page.keyboard.press("Enter")
        expect(visitor.page.get_by_label("API key")).to_be_hidden()
        visitor.write()
        visitor.press("Copy link")
        assert "secret" not in visitor.page.url
        visitor.page.reload()
        expect(visitor.page.locator("#go")).to_be_enabled()
        visitor.wait()


def test_a_server_that_has_gone_is_told(llm, visit):
    with served(llm) as server:
        visitor = visit(server, allowed="net::ERR")
        with llm.engine.wrapped(Gate) as gate:
            visitor.press("Continue")
            gate.allow(3)
            expect(visitor.made).to_have_count(3)
            for connection in [*server._server.server_state.connections]:
                server.loop.call_soon_threadsafe(connection.transport.abort)
            expect(visitor.alert).to_have_text("The server does not answer. Is it still running?")
            gate.allow(float("inf"))
    visitor.press("Continue")
    expect(visitor.alert).to_have_text("The server does not answer. Is it still running?")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_the_field_lies_over_its_marks(server, visit, scheme):
    visitor = visit(server, TEXT * 6, color_scheme=scheme)
    visitor.write()
    for width in (360, 700, 1280):
        visitor.page.set_viewport_size({"width": width, "height": 700})
        heights = visitor.page.evaluate("""() => ['text', 'marks'].map(id => {
            const style = document.getElementById(id).style;
            style.alignSelf = 'start';
            style.height = id === 'text' ? '0' : 'auto';
            return document.getElementById(id).scrollHeight;
        })""")
        assert heights[0] == heights[1]
        assert visitor.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert visitor.page.locator("#controls").bounding_box()["height"] < 60  # one row
    ink, desk = visitor.page.evaluate(
        "['color', 'backgroundColor'].map(name => getComputedStyle(document.body)[name].match(/\\d+/)[0])"
    )
    assert (int(ink) < int(desk)) == (scheme == "light")


def test_the_policy_allows_what_stands_in_the_page_alone(server, visit):
    visitor = visit(server)
    visitor.page.evaluate("""() => {
        const script = document.createElement('script');
        script.textContent = 'document.title = "broken into"';
        document.body.append(script);
    }""")
    assert visitor.page.title() == "tinygpt"
    assert any("Content Security Policy" in complaint for complaint in visitor.complaints)
    visitor.complaints.clear()


def test_a_look_inside_shows_layers_and_what_a_head_attends_to(llm, visit):
    with served(llm, look=True) as server:
        visitor = visit(server, viewport={"width": 390, "height": 844})
        visitor.click(5)
        button, rows, arcs = (visitor.page.locator(each) for each in ("#look", "#inside > div", "#arcs path"))
        best, share = (visitor.options.first.locator(each).inner_text() for each in (".best", ".share"))
        button.click()
        expect(rows).to_have_count(llm.config.n_layer)
        last = rows.last.locator(".best, .share").all_inner_texts()
        maps = llm.attentions(ids_of(llm, TEXT)[:5])[:, :, -1]  # (L, H, T)
        for layer, head in ((0, 0), (llm.config.n_layer - 1, llm.config.n_head - 1)):
            rows.nth(layer).locator("button").nth(head).hover()
            found = arcs.evaluate_all("all => all.map(each => Number(each.getAttribute('opacity')))")
            weights = maps[layer, head]
            assert found == pytest.approx(weights[weights >= 0.01].tolist(), abs=1e-4)
            i = 1 + int(weights[1:].argmax())
            label = rows.nth(layer).locator("button").nth(head).get_attribute("aria-label")
            expect(visitor.page.locator("#told")).to_have_text(label)
            assert label.startswith(f"layer {layer}, head {head}: ")
            assert label.endswith(f" % to {llm.tokenizer.decode([ids_of(llm, TEXT)[i]]).strip()}")
        names = visitor.page.locator("#inside > p > span").all_inner_texts()
        assert names == ["layer", "says", "share", "heads"]
        box = rows.last.locator("button").last.bounding_box()
        assert min(box["width"], box["height"]) >= 24
        begins, ends = (
            [(box := visitor.page.locator(".word").nth(k).bounding_box())["x"] + box["width"] / 2, box["y"]]
            for k in (4, 0)
        )
        page = visitor.page.locator("#page").bounding_box()
        numbers = [float(each) for each in re.findall(r"[\d.]+", arcs.first.get_attribute("d"))]
        expected = [begins[0] - page["x"], begins[1] - page["y"], ends[0] - page["x"], ends[1] - page["y"]]
        assert [*numbers[:2], *numbers[-2:]] == pytest.approx(expected, abs=1)
        popup, trace = (visitor.page.locator(each).bounding_box() for each in ("#candidates", "#trace"))
        assert last == [best, share]
        assert popup["y"] + popup["height"] <= trace["y"] or popup["x"] >= trace["x"] + trace["width"]
        visitor.page.keyboard.press("Escape")
        expect(arcs).to_have_count(0)
        visitor.click(0)  # nothing is before it
        expect(button).to_be_hidden()


def test_a_look_behind_the_models_own_beginning(llm, visit):
    with served(llm, look=True) as server:
        visitor = visit(server, "", max_tokens=3)
        visitor.write()
        visitor.click(0)  # BOS is before it
        visitor.page.locator("#look").click()
        expect(visitor.page.locator("#inside > div")).to_have_count(llm.config.n_layer)
        expect(visitor.page.locator("#arcs path")).to_have_count(0)
