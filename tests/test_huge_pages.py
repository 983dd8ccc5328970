"""Packed weights lie in regions for which Linux is asked for huge pages. A region lives as long as its tensors."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from helpers.fast import kernels
from helpers.fast.kernels.huge_pages import LINE, REGION, HugePages

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")


def test_tensors_of_all_shapes_and_dtypes_lie_side_by_side_without_overlapping():
    pages, shapes = HugePages(), [(3,), (0, 5), (7, 64), (2, 3, 5), (REGION // 4 + 1,), (1,)]
    tensors = [pages.empty(shape, dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [tuple(tensor.shape) for tensor in tensors[::2]] == shapes
    for number, tensor in enumerate(tensors):
        assert tensor.is_contiguous() and tensor.data_ptr() % LINE == 0 and (tensor == number).all()


def test_weights_share_a_region_which_is_freed_with_the_last_of_them():
    pages = HugePages()
    tensors = [pages.empty((1000, 300), torch.float32) for _ in range(3)]
    region, start = pages._newest, tensors[0].data_ptr()
    assert [tensor.data_ptr() - start for tensor in tensors] == [0, 1_200_000, 2_400_000]
    del tensors[0]
    tensors.append(pages.empty((1000, 300), torch.float32))
    assert region() is not None and tensors[-1].data_ptr() - start == 3_600_000, "the gap is not used again"
    tensors.clear()
    assert region() is None
    assert pages.empty((1,), torch.float32).fill_(1) == 1, "and the next tensor gets a new region"


@pytest.mark.parametrize("size", [REGION // 2 + LINE, REGION + LINE])
def test_small_tensors_do_not_share_the_region_of_a_large_one_and_keep_it(size):
    pages = HugePages()
    before = pages.empty((1,), torch.float32)
    large = pages.empty((size,), torch.uint8)
    after = pages.empty((1,), torch.float32)
    assert after.data_ptr() == before.data_ptr() + LINE
    assert large.data_ptr() % LINE == 0 and large.fill_(7).sum(dtype=torch.int64) == 7 * size


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this Linux has no huge pages")
def test_linux_is_asked_for_huge_pages_where_packed_weights_lie():
    if problem := kernels.unavailable():
        pytest.skip(problem)
    panels = kernels.pack(torch.ones(64, 64)).panels
    assert "hg" in flags_at(panels.data_ptr())


def flags_at(address: int) -> list[str]:
    """Return the flags of the mapping that holds an address."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(number, 16) for number in mapping.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return re.search("VmFlags: (.*)", mapping)[1].split()
    raise LookupError(hex(address))


@pytest.mark.parametrize("missing", [["MADV_HUGEPAGE"], ["MADV_HUGEPAGE", "MAP_PRIVATE"]], ids=["macOS", "Windows"])
def test_without_huge_pages_tensors_get_ordinary_ones(monkeypatch, missing):
    for name in missing:
        monkeypatch.delattr(mmap, name)
    assert HugePages().empty((5,), torch.float32).fill_(2).tolist() == [2] * 5
