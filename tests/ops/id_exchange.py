# SPDX-License-Identifier: Apache-2.0
"""A world in one process: all encode, messages are carried, all decode."""

import itertools

import numpy as np

from tests.ops.csr_batches import csr_batch
from tfdist_ext.tables import placement as placement_lib
from tfdist_ext.tables.placement import FeaturePlacement

NONE = np.zeros(0, np.float32)


def placed(name, limit, row_parts, column_parts, first=0, world_size=None):
    """Cells on consecutive ranks, from rank `first` on, round the world."""
    cells = row_parts * column_parts
    ranks = (np.arange(first, first + cells) % (world_size or cells)).tolist()
    return FeaturePlacement(
        name, limit, 8, row_parts, column_parts, tuple(ranks)
    )


def by_row(limit, world_size):
    return [placed("emb", limit, world_size, 1)]


def by_column(limit, world_size):
    return [placed("emb", limit, 1, world_size)]


def features_of(world_size):
    """Features of all kinds of placement, some ranks holding none of some."""
    kinds = [
        ("row", 97, world_size, 1, 0),
        ("column", 50, 1, world_size, 0),
        ("table", 1000, 1, 1, world_size - 1),
        ("part", 20, max(world_size // 2, 1), 1, 1),
    ]
    if world_size == 4:
        kinds.append(("grid", 64, 2, 2, 1))
    return [placed(*kind, world_size=world_size) for kind in kinds]


def batch_of(rng, samples, most_ids, limit, weighted=False, dtype=np.int64):
    """Random ids, with duplicates and empty samples: (ids, splits, weights)."""
    ids, splits, weights = csr_batch(rng, samples, most_ids, limit, weighted)
    return (ids**2 // limit).astype(dtype), splits, weights


def merged(lists):
    """What a sample's ids are in all: a dict {id: weight} per sample."""
    samples = [{} for _ in lists[0][1][1:]]
    for ids, splits, weights in lists:
        for s, total in enumerate(samples):
            for i in range(splits[s], splits[s + 1]):
                weight = weights[i] if len(weights) else 1.0
                total[int(ids[i])] = total.get(int(ids[i]), 0.0) + weight
    return samples


def encode(module, batch, placements, rank, world_size, **options):
    """Encodes one rank's batch: for every feature, its lists."""
    count = len(placements)
    lists = [each for feature in batch for each in feature]
    outputs = module.encode_ids(
        *zip(*lists, strict=True),
        len(batch[0][0][1]) - 1.0,
        placements=placements,
        rank=rank,
        world_size=world_size,
        list_features=[f for f, each in enumerate(batch) for _ in each],
        out_of_range=options.pop("out_of_range", ["error"] * count),
        unique=options.pop("unique", [False] * count),
        **options,
    )
    return [x.numpy() for x in outputs]


def message_to(rank, encoded):
    payload, splits = encoded[:2]
    assert splits.sum() == len(payload)
    begin = splits[:rank].sum()
    return payload[begin : begin + splits[rank]]


def decode(module, encoded, placements, rank, **options):
    parts = [message_to(rank, each) for each in encoded]
    outputs = module.decode_ids(
        np.concatenate(parts),
        np.array([len(part) for part in parts]),
        placements=placements,
        rank=rank,
        world_size=len(encoded),
        **options,
    )
    return [x.numpy() for x in outputs]


def exchange(module, batches, placements, **options):
    """Encodes and decodes on all ranks; numpy (encoded, decoded) per rank."""
    world_size = len(batches)
    encoded = [
        encode(module, batch, placements, rank, world_size, **options)
        for rank, batch in enumerate(batches)
    ]
    decoded = [
        decode(module, encoded, placements, rank) for rank in range(world_size)
    ]
    return encoded, decoded


def received(encoded, decoded, placements):
    """Puts what the owners decoded together again.

    A dict {(sample, id, column part): weight} per rank and feature.
    """
    ranks = range(len(encoded))
    found = [[{} for _ in placements] for _ in ranks]
    for owner, outputs in enumerate(decoded):
        row_splits, rows, weights, served, _ = outputs
        next_sample = 0
        for rank, f in itertools.product(ranks, range(len(placements))):
            assert served[rank, f] == encoded[rank][3][owner, f]
            place = placements[f]
            if owner not in place.ranks:
                assert served[rank, f] == 0
                continue
            part, column = divmod(place.ranks.index(owner), place.column_parts)
            ids = placement_lib.ids_of_part(
                part, place.row_parts, place.vocabulary_size
            )
            ends = encoded[rank][3].ravel().cumsum()
            end = ends[owner * len(placements) + f]
            for sample in encoded[rank][2][end - served[rank, f] : end]:
                entries = range(*row_splits[next_sample : next_sample + 2])
                assert len(entries) > 0
                next_sample += 1
                for i in entries:
                    key = (sample, ids[rows[i]], column)
                    assert key not in found[rank][f]
                    weight = weights[i] if len(weights) else 1.0
                    found[rank][f][key] = weight
        assert next_sample == len(row_splits) - 1
    return found


def expected(lists, placement):
    return {
        (s, i, column): weight
        for s, sample in enumerate(merged(lists))
        for i, weight in sample.items()
        for column in range(placement.column_parts)
    }
