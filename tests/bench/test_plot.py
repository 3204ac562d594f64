"""tinygpt.bench.plot: what pictures show, that all of it is legible, and files of the two formats."""

import itertools
import struct
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from tinygpt.bench.picture import Line, Panel, Picture, Point, model_name
from tinygpt.bench.plot import COLOURS, MAX_LINES, PUBLISHED_COLOURS, check, check_lines, draw, picture_of, plot, save
from tinygpt.errors import RequestError

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")

OURS = Line("ours", (Point.of(1, [10, 12, 15]), Point.of(8, [39, 44, 41])))
THEIRS = Line("theirs", (Point.exact(1, 5), Point.exact(8, 20)), is_published=True)


def record(dtype="float32", batch_size=1, n_prompt=0, n_gen=0, n_depth=0, n_threads=2):
    sizes = {"batch_size": batch_size, "n_prompt": n_prompt, "n_gen": n_gen, "n_depth": n_depth, "n_threads": n_threads}
    return {
        "model_filename": "models/some-model",
        "cpu_info": "A CPU",
        "dtype": dtype,
        **sizes,
        "samples_ts": [90.0, 100.0, 130.0],
    }


def labels(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def boxes(figure) -> dict[str, object]:
    """Everything that may cover something else, with the room it takes on the canvas."""
    figure.draw_without_rendering()  # lays it out
    found = {"title": figure._suptitle.get_window_extent()}
    found |= {f"panel {i}": axes.get_tightbbox() for i, axes in enumerate(figure.axes)}
    found |= {f"legend {i}": legend.get_window_extent() for i, legend in enumerate(figure.legends)}
    if figure._supxlabel is not None:
        found["note"] = figure._supxlabel.get_window_extent()
    return found


# What is in a picture.


def test_point_of_samples_is_the_median_with_their_range():
    assert Point.of(3, [5.0, 1.0, 2.0], "three") == Point(3, 2.0, 1.0, 5.0, "three")


def test_prompts_and_generation_have_a_panel_each():
    records = [record(batch_size=size, **kind) for size in (1, 4, 16) for kind in ({"n_prompt": 128}, {"n_gen": 32})]
    picture = picture_of(records)
    assert picture.title == "Speed of some-model"
    assert picture.note.startswith("A CPU. ")
    assert [panel.title for panel in picture.panels] == ["Reading prompts", "Generating"]
    assert {panel.x_label for panel in picture.panels} == {"batch size (sequences)"}
    assert {panel.y_label for panel in picture.panels} == {"tokens/s"}
    assert picture.panels[0].lines[0].points[1] == Point(4, 100.0, 90.0, 130.0)


def test_there_is_no_panel_of_what_was_not_measured():
    (panel,) = picture_of([record(batch_size=size, n_prompt=128) for size in (1, 4)]).panels
    assert panel.title == "Reading prompts"


def test_what_has_most_values_is_the_x_axis_and_the_others_are_named():
    records = [
        record(dtype, size, n_prompt=length)
        for dtype in ("float32", "int8")
        for size in (1, 4)
        for length in (16, 512, 64)
    ]
    (panel,) = picture_of(records).panels
    assert panel.x_label == "prompt length (tokens)"
    assert [line.label for line in panel.lines] == [
        "float32, batch 1",
        "float32, batch 4",
        "int8, batch 1",
        "int8, batch 4",
    ]
    assert [line.group for line in panel.lines] == ["float32", "float32", "int8", "int8"]
    assert [point.x for point in panel.lines[0].points] == [16, 64, 512]


@pytest.mark.parametrize(
    ("field", "label"),
    [
        ({"n_gen": (16, 32)}, "generation length (tokens)"),
        ({"n_depth": (128, 512)}, "tokens in the cache before"),
        ({"n_threads": (1, 2)}, "threads"),
    ],
)
def test_x_axis_of_generation(field, label):
    ((name, values),) = field.items()
    (panel,) = picture_of([record(**{"n_gen": 8, name: value}) for value in values]).panels
    assert panel.x_label == label


def test_where_dtypes_alone_differ_they_have_bars():
    (panel,) = picture_of([record(dtype, n_gen=8) for dtype in ("float32", "int8")]).panels
    assert panel.names == ("float32", "int8")
    assert [point.name for point in panel.lines[0].points] == ["100", "100"]


@pytest.mark.parametrize(
    ("model", "name"),
    [("demo", "demo"), ("openai-community/gpt2", "gpt2"), ("/some/folder/", "folder"), ("random:124M", "random:124M")],
)
def test_model_name(model, name):
    assert model_name(model) == name


@pytest.mark.parametrize(("ys", "is_log"), [([1, 8], True), ([1, 7], False), ([0, 100], False), ([5], False)], ids=str)
def test_wide_ranges_have_logarithmic_axes(ys, is_log):
    points = tuple(Point.exact(x, y) for x, y in enumerate(ys, start=1))
    figure = draw(Picture("", (Panel("", "x", "y", (Line("a", points),)),)))
    assert figure.axes[0].get_yscale() == ("log" if is_log else "linear")
    if not is_log:
        assert figure.axes[0].get_ylim()[0] == 0


# How it is drawn.


def test_axes_are_labelled_with_every_size_that_was_measured():
    figure = draw(Picture("Title, demo", (Panel("Left", "batch (n)", "time (s)", (OURS, THEIRS)),), "A note."))
    (axes,) = figure.axes
    assert figure._suptitle.get_text() == "Title, demo"
    assert axes.get_title(loc="left") == "Left"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("batch (n), log scale", "time (s)")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "8"]
    assert labels(figure) == ["ours", "theirs"]
    assert figure.legends[0].get_title().get_text() == "A note."


def test_error_bars_reach_over_the_samples():
    figure = draw(Picture("", (Panel("", "x", "y", (OURS,)),)))
    (segments,) = [found for found in figure.axes[0].collections if hasattr(found, "get_segments")]
    ends = [[y for _, y in segment] for segment in segments.get_segments()]
    assert ends == [[10, 15], [39, 44]]


def test_published_lines_are_grey_dashed_and_behind_ours():
    figure = draw(Picture("", (Panel("", "x", "y", (THEIRS, OURS)),)))
    theirs, ours = (container.lines[0] for container in figure.axes[0].containers)
    assert theirs.get_color() in PUBLISHED_COLOURS
    assert theirs.get_linestyle() == "--"
    assert ours.get_color() == COLOURS[0]
    assert theirs.get_zorder() < ours.get_zorder()


def test_a_group_has_a_colour_and_its_lines_have_markers():
    lines = [Line(f"{group} {i}", OURS.points, group) for group in ("a", "b") for i in range(2)]
    drawn = [
        container.lines[0] for container in draw(Picture("", (Panel("", "x", "y", tuple(lines)),))).axes[0].containers
    ]
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in drawn]
    assert len(set(looks)) == 4
    assert looks[0][0] == looks[1][0] != looks[2][0] == looks[3][0]
    assert looks[0][2] == looks[2][2] != looks[1][2]


def test_lines_of_one_group_alone_have_colours_of_their_own():
    lines = tuple(Line(str(i), OURS.points, "a") for i in range(2))
    drawn = draw(Picture("", (Panel("", "x", "y", lines),))).axes[0].containers
    assert len({container.lines[0].get_color() for container in drawn}) == 2


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_markers_are_distinct_within_a_panel(num_groups):
    """As many lines as may be, and published ones; the panels have none in common."""

    def panel(name: str) -> Panel:
        lines = [Line(f"{name} {i}", OURS.points, f"{i % num_groups}") for i in range(MAX_LINES)]
        theirs = [Line(f"theirs {name} {i}", THEIRS.points, is_published=True) for i in range(2)]
        return Panel(name, "x", "y", (*lines, *theirs))

    for axes in draw(Picture("", (panel("a"), panel("b")))).axes:
        assert len({container.lines[0].get_marker() for container in axes.containers}) == MAX_LINES + 2


def test_a_new_line_in_a_later_panel_has_another_marker_than_those_it_has_already():
    panels = Panel("", "x", "y", (OURS,)), Panel("", "x", "y", (Line("new", OURS.points), OURS))
    new, ours = draw(Picture("", panels)).axes[1].containers
    assert new.lines[0].get_marker() != ours.lines[0].get_marker()


def test_axes_of_one_unit_are_of_one_kind():
    narrow = Panel("", "x", "tokens/s", (Line("a", (Point.exact(1, 5), Point.exact(2, 6))),))
    wide = Panel("", "x", "tokens/s", (Line("a", (Point.exact(1, 1), Point.exact(64, 90))),))
    other = Panel("", "z", "GB", narrow.lines)
    left, middle, right = draw(Picture("", (narrow, wide, other))).axes
    assert [axes.get_xlabel() for axes in (left, middle, right)] == ["x, log scale", "x, log scale", "z"]
    assert [axes.get_ylabel() for axes in (left, middle, right)] == ["tokens/s, log scale", "tokens/s, log scale", "GB"]
    assert left.get_ylim()[1] >= 8 * left.get_ylim()[0]  # so that it has ticks


def test_too_many_lines_are_refused():
    def records(num_depths: int) -> list[dict]:
        return [record(batch_size=size, n_gen=8, n_depth=i) for size in range(1, 40) for i in range(num_depths)]

    check_lines(records(MAX_LINES))
    with pytest.raises(RequestError, match=r"would draw 13 lines .* give fewer values of --dtype"):
        check_lines(records(MAX_LINES + 1))


def test_one_thread_is_one():
    records = [record(batch_size=size, n_gen=8, n_threads=threads) for size in (1, 2, 4) for threads in (1, 2)]
    assert [line.label for line in picture_of(records).panels[0].lines] == ["float32, 1 thread", "float32, 2 threads"]


def test_a_single_run_is_no_median():
    records = [record(batch_size=size, n_gen=8) | {"samples_ts": [5.0]} for size in (1, 2)]
    assert picture_of(records).note == "A CPU. Points are single runs."


def test_a_kv_cache_that_does_not_go_with_the_weights_is_noted():
    caches = {"float32": "bfloat16", "bfloat16": "bfloat16", "int8": "int8"}
    records = [record(dtype, size, n_gen=8) | {"kv_cache_dtype": caches[dtype]} for dtype in caches for size in (1, 2)]
    assert picture_of(records).note.endswith("of them. KV cache of float32 in bfloat16. KV cache of int8 in int8.")


def test_a_line_looks_the_same_in_every_panel():
    panels = Panel("", "x", "y", (THEIRS, OURS)), Panel("", "x", "y", (OURS,))
    figure = draw(Picture("", panels))
    ours = [axes.containers[-1].lines[0] for axes in figure.axes]
    assert ours[0].get_color() == ours[1].get_color()
    assert labels(figure) == ["theirs", "ours"]


def test_bars_begin_at_zero_with_the_first_name_at_the_top():
    line = Line("median", (Point.of(0, [100, 200]), Point.of(1, [1])))
    (axes,) = draw(Picture("", (Panel("", "dtype", "tokens/s", (line,), ("float32", "int8")),))).axes
    assert axes.get_xscale() == "linear"
    assert axes.get_xlim()[0] == 0
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("tokens/s", "dtype")
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["float32", "int8"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    assert [bar.get_width() for bar in axes.patches] == [150, 1]


@pytest.mark.parametrize("num_panels", [1, 2, 3, 4])
@pytest.mark.parametrize("num_lines", [1, 2, 8, MAX_LINES])
def test_nothing_covers_anything_and_nothing_is_cut_off(num_panels, num_lines):
    lines = tuple(Line(f"bfloat16, number {i}", OURS.points) for i in range(num_lines))
    panel = Panel("A panel", "generation length (tokens)", "throughput (tokens/ms)", lines)
    figure = draw(Picture("A title, demo", (panel,) * num_panels, "A note on what the error bars are."))
    found = boxes(figure)
    for (a, box), (b, other) in itertools.combinations(found.items(), 2):
        assert not box.overlaps(other), f"{a} covers {b}"
    for name, box in found.items():
        assert min(box.x0, box.y0) >= 0, f"{name} is cut off"
        assert (box.x1 <= 900, box.y1 <= 600) == (True, True), f"{name} is cut off"


def test_panels_to_be_compared_share_their_y_axis():
    low = Panel("", "x", "y", (Line("a", (Point.exact(1, 1), Point.exact(2, 2))),))
    high = Panel("", "x", "y", (Line("a", (Point.exact(1, 4), Point.exact(2, 5))),))
    left, right = draw(Picture("", (low, high), has_shared_y=True)).axes
    assert left.get_ylim() == right.get_ylim()
    assert (left.get_ylabel(), right.get_ylabel()) == ("y", "")


# Files.


def test_png_has_900_x_600_pixels(tmp_path):
    plot([record(batch_size=size, n_gen=8) for size in (1, 2)], tmp_path / "picture.png")
    data = (tmp_path / "picture.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (900, 600)
    assert len(data) > 5000


def test_svg_is_one(tmp_path):
    save(Picture("Title", (Panel("", "x", "y", (OURS, THEIRS)),)), tmp_path / "picture.SVG")
    root = ElementTree.parse(tmp_path / "picture.SVG").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 10


@pytest.mark.parametrize("name", ["picture.jpg", "picture", "png"])
def test_other_formats_are_refused(name):
    with pytest.raises(RequestError, match=rf"{name}: its name must end in \.png or \.svg"):
        check(name)


def test_absent_matplotlib_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RequestError, match=r'pip install "\.\[plot\]"'):
        plot([record(n_gen=8)], tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())
