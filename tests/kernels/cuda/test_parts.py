"""Arrays that are parts of one."""

import numpy as np

from tinygpt.kernels.cuda.step import Parts

PARTS = Parts({"seeds": (2, np.uint64), "rows": (3, np.int32)})


def test_parts_lie_one_after_another():
    assert PARTS.num_bytes == 2 * 8 + 3 * 4
    whole = np.arange(PARTS.num_bytes, dtype=np.uint8)
    parts = PARTS.split(whole)
    assert [(name, part.size, part.dtype) for name, part in parts.items()] == [
        ("seeds", 2, "uint64"),
        ("rows", 3, "int32"),
    ]
    parts["rows"][0] = 0
    assert (whole[16:20] == 0).all()


def test_what_is_not_given_is_zero():
    whole = PARTS.join({"seeds": np.array([2**63 + 1, 5], np.uint64), "rows": np.array([-1])})
    parts = PARTS.split(whole)
    assert parts["seeds"].tolist() == [2**63 + 1, 5]
    assert parts["rows"].tolist() == [-1, 0, 0]
