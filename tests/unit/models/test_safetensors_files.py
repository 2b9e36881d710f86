"""Several writers write their boxes into files whose headers were written before. Together these are the tensors."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlctl.models.hf_folder import FolderWriter, list_weight_files
from rlctl.models.safetensors_files import contiguous_runs
from rlctl.training.rank_checkpoint import FilesWritten, PiecesRead
from rlctl.training.trainer_save import join_export
from rlctl.utils.digests import PIECE, StreamDigest, count_pieces, join_pieces, piece_digest

TENSORS = {
    "rows": torch.randn(7, 5).to(torch.bfloat16),
    "scale": torch.randn(()),
    "experts": torch.randn(4, 6, 3),
    "flags": torch.tensor([True, False, True]),
}
LAYOUT = [(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in TENSORS.items()]


def test_writers_of_rows_and_columns_make_one_file_that_safetensors_reads(tmp_path: Path) -> None:
    writers = [FolderWriter(tmp_path, LAYOUT) for _ in range(2)]
    for rank, writer in enumerate(writers):
        writer.write("rows", (4 * rank, 0), TENSORS["rows"][4 * rank : 4 * rank + 4])
        # Some columns of each expert's matrix, which are one run of bytes in each row.
        writer.write("experts", (0, 0, 2 * rank), TENSORS["experts"][:, :, 2 * rank : 2 * rank + 2])
    writers[1].write("scale", (), TENSORS["scale"])
    writers[1].write("flags", (0,), TENSORS["flags"])
    writers[0].write_headers()
    sums = [writer.sync() for writer in writers]
    for writer in writers:
        writer.__exit__()
    (file,) = list_weight_files(tmp_path)
    read_tensors = load_file(file)
    assert read_tensors.keys() == TENSORS.keys()
    assert all(torch.equal(read_tensors[name], tensor) for name, tensor in TENSORS.items())
    assert sum(sums) == sum(file.read_bytes())


def test_a_wider_tensor_is_cast_to_the_dtype_of_the_folder(tmp_path: Path) -> None:
    wide = torch.randn(3)
    with FolderWriter(tmp_path, [("w", (3,), "bfloat16")]) as writer:
        writer.write("w", (0,), wide)
        writer.write_headers()
    assert torch.equal(load_file(list_weight_files(tmp_path)[0])["w"], wide.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("shape", "start", "size", "expected"),
    [
        ((4, 3), (1, 0), (2, 3), [(3, 6)]),
        ((4, 3), (1, 1), (2, 2), [(4, 2), (7, 2)]),
        ((2, 2, 2), (0, 1, 0), (2, 1, 2), [(2, 2), (6, 2)]),
        ((), (), (), [(0, 1)]),
    ],
)
def test_a_box_is_as_few_runs_as_it_can_be(
    shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    assert list(contiguous_runs(shape, start, size)) == expected


def test_the_digest_of_a_stream_is_that_of_the_pieces_of_its_file(tmp_path: Path) -> None:
    for size in (0, 10, PIECE, PIECE + 7):
        content = torch.arange(size, dtype=torch.uint8).numpy().tobytes()
        stream = StreamDigest()
        for begin in range(0, size, 10**7):
            stream.update(memoryview(content)[begin : begin + 10**7])
        (tmp_path / "file").write_bytes(content)
        pieces = [piece_digest(tmp_path / "file", number) for number in range(count_pieces(size))]
        assert stream.hexdigest() == join_pieces(pieces)


def test_an_export_that_lost_bytes_on_its_way_to_the_disk_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"abc")
    written = FilesWritten({}, export_sum=sum(b"abc"), seconds=0.0)
    read = PiecesRead({str(file): {0: b"digest"}}, read_sum=sum(b"abc"))
    assert join_export(tmp_path, [written], [read]) == {file: (3, join_pieces([b"digest"]))}
    with pytest.raises(OSError, match="does not hold the bytes"):
        join_export(tmp_path, [written, written], [read])
