# SPDX-License-Identifier: Apache-2.0
"""Every op has a kernel for GPUs, or a reason to run on the host."""

import pathlib
import re

SOURCES = pathlib.Path(__file__).parents[2] / "custom_ops"
OP = re.compile(r'(?:REGISTER_OP|TFDIST_UPDATE_OP)\("(Tfdist>\w+)"')
KERNEL = re.compile(
    r'Name\("(Tfdist>\w+)"\)\s*\.(?:Device\(kGpuDevice\)|TFDIST_ON_GPU)'
)
IDS = "ids come from the input pipeline, on the host, and leave from there"
BATCHES = "batches come from the input pipeline, on the host"
FILES = "files are read into the memory of the host"
KEYS = "vocabularies are hash maps on the host, where keys arrive"
BYTES = "bytes for the wire are made by the host, which sends them"
REQUESTS = "a thread of the host answers requests, in the memory of the host"
SNAPSHOTS = "shards on a GPU are copied to the host when a save starts"
UPDATES = "on a GPU, LookupGrad and the update of rows are two ops"
GROUP = "it tells ranks of each other, with no numbers of a table"
ON_HOST = {
    **dict.fromkeys(("EncodeIds", "MergeIds", "UniqueIds", "CheckPlan"), IDS),
    **dict.fromkeys(
        (
            *("Vocabulary", "VocabularyCounts", "AskKeys", "AnswerKeys"),
            *("ReadRows", "LocalRows", "TakeResets", "ExportKeys"),
            *("ImportKeys", "StoreTexts", "StoredTexts", "ReleaseTexts"),
        ),
        KEYS,
    ),
    **dict.fromkeys(("ReadPiece", "AssignPiece"), FILES),
    "SliceOfRank": BATCHES,
    **dict.fromkeys(
        (
            *("ApplyLookupGradSgd", "ApplyLookupGradMomentum"),
            *("ApplyLookupGradAdagrad", "ApplyLookupGradRowWiseAdagrad"),
            *("ApplyLookupGradAdam", "ApplyLookupGradFtrl"),
        ),
        UPDATES,
    ),
    **dict.fromkeys(("StartRowSnapshot", "TakeSnapshotRows"), SNAPSHOTS),
    **dict.fromkeys(("PackNumbers", "UnpackNumbers"), BYTES),
    **dict.fromkeys(("EncodeInt8", "DecodeInt8"), BYTES),
    **dict.fromkeys(
        ("Request", "Serve", "Reply", "SetHandler", "SetClock"), REQUESTS
    ),
    **dict.fromkeys(
        (
            *("Barrier", "GroupOpen", "GroupClose", "GroupStats"),
            *("GroupTrace", "GroupInsertKey", "GroupAwaitKey"),
            *("GroupLeave", "GroupLeft", "GroupLeaves"),
        ),
        GROUP,
    ),
}


def test_every_op_has_a_kernel_for_gpus_or_a_reason_to_have_none():
    texts = [path.read_text() for path in SOURCES.rglob("*.cc")]
    ops = {name for text in texts for name in OP.findall(text)}
    on_gpu = {name for text in texts for name in KERNEL.findall(text)}
    assert len(ops) > 50
    without = {name.removeprefix("Tfdist>") for name in ops - on_gpu}
    assert without == set(ON_HOST), "Write the kernel, or say why there is none"
